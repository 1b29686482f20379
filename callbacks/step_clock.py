"""StepClock: where the time of a rank's optimizer steps goes: compute, waiting for other ranks, waiting for data."""

from __future__ import annotations

from time import perf_counter, thread_time
from typing import Literal, NamedTuple

import torch


class StepTimes(NamedTuple):
    """Seconds of steps, added up, and how many steps they are of."""

    compute: float
    communication_wait: float
    data_wait: float
    num_steps: int


class StepClock:
    """Adds up the parts of steps, on the host's clock; a step that has not been started costs and counts nothing.

    Where ranks may wait for each other, on a CPU, compute is the processor time of this thread (gloo waits without
    any) and the rest is waiting. On another device, which the clock waits for at every mark, the two cannot be told
    apart on one rank: both are booked as communication wait.

    Args:
        device: of this rank.
        meets: whether ranks wait for each other in a step at all.
        meets_in_forward: whether they do so in forward as well.
    """

    def __init__(self, device: torch.device, *, meets: bool, meets_in_forward: bool) -> None:
        self._device = device
        self.is_exact = device.type == "cpu"
        """Whether marks cost little, and compute and waiting are told apart."""
        self._meets = {"forward": meets and meets_in_forward, "backward": meets}
        self._phase: Literal["data", "other", "forward", "backward"] | None = None
        self._wall = self._busy = 0.0
        self._compute = self._communication_wait = self._data_wait = 0.0
        self._num_steps = 0

    def start(self) -> None:
        """Begin a step: from here to its first micro-batch is waiting for data."""
        self._lap()
        self._phase = "data"

    def begin_micro_batch(self) -> None:
        """Note that a batch is on the device, and its forward begins."""
        if self._phase is not None:
            self._lap()
            self._phase = "forward"

    def begin_backward(self) -> None:
        """Note that forward has ended; what is left of the step is backward and update."""
        if self._phase is not None:
            self._lap()
            self._phase = "backward"

    def interrupt(self) -> None:
        """Note that something begins that is not part of a step, and ends the one that is running."""
        if self._phase == "data":
            self._phase = "other"
        elif self._phase != "other":
            self.end()

    def end(self) -> None:
        """Count the step; one that never had a micro-batch is left out."""
        if self._phase in ("forward", "backward"):
            self._lap()
            self._num_steps += 1
        self._phase = None

    def take(self) -> StepTimes:
        """Return what was added up since the last time, and begin anew."""
        times = StepTimes(self._compute, self._communication_wait, self._data_wait, self._num_steps)
        self._compute = self._communication_wait = self._data_wait = 0.0
        self._num_steps = 0
        return times

    def _lap(self) -> None:
        """Book the time since the last mark on the phase that ends now."""
        if not self.is_exact:
            torch.accelerator.synchronize(self._device)
        wall, busy, phase = perf_counter(), thread_time(), self._phase
        elapsed = wall - self._wall
        if phase == "data":
            self._data_wait += elapsed
        elif phase == "forward" or phase == "backward":
            compute = elapsed
            if self._meets[phase]:
                compute = min(busy - self._busy, elapsed) if self.is_exact else 0.0
            self._compute += compute
            self._communication_wait += elapsed - compute
        self._wall, self._busy = wall, busy
