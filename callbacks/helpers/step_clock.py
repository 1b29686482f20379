"""StepClock: where the time of a rank's optimizer steps goes: compute, waiting for other ranks, waiting for data."""

from __future__ import annotations

from time import perf_counter, thread_time
from typing import Literal, NamedTuple

import torch

_Phase = Literal["none", "data", "other", "forward", "backward"]


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
        self._meets: set[_Phase] = {"forward", "backward"} if meets_in_forward else {"backward"}
        if not meets:
            self._meets.clear()
        self._phase: _Phase = "none"
        self._wall = self._busy = 0.0
        self._compute = self._communication_wait = self._data_wait = 0.0
        self._num_steps = 0

    def start(self) -> None:
        """Begin a step: from here to its first micro-batch is waiting for data."""
        self._enter("data")

    def begin_micro_batch(self) -> None:
        """Note that a batch is on the device, and its forward begins."""
        if self._phase != "none":
            self._enter("forward")

    def begin_backward(self) -> None:
        """Note that forward has ended; what is left of the step is backward and update."""
        if self._phase != "none":
            self._enter("backward")

    def interrupt(self) -> None:
        """Note that something begins that is not part of a step, and ends the one that is running."""
        if self._phase == "data":
            self._phase = "other"
        elif self._phase != "other":
            self.end()

    def end(self) -> None:
        """Count the step; one that never had a micro-batch is left out."""
        if self._phase == "forward" or self._phase == "backward":
            self._enter("none")
            self._num_steps += 1
        self._phase = "none"

    def take(self) -> StepTimes:
        """Return what was added up since the last time, and begin anew."""
        times = StepTimes(self._compute, self._communication_wait, self._data_wait, self._num_steps)
        self._compute = self._communication_wait = self._data_wait = 0.0
        self._num_steps = 0
        return times

    def _enter(self, next_phase: _Phase) -> None:
        """Book the time since the last mark on the phase that ends now."""
        if not self.is_exact:
            torch.accelerator.synchronize(self._device)
        phase, meets = self._phase, self._meets
        wall = perf_counter()
        # a system call, and the better part of what a mark costs
        busy = thread_time() if self.is_exact and (phase in meets or next_phase in meets) else 0.0
        elapsed = wall - self._wall
        if phase == "data":
            self._data_wait += elapsed
        elif phase == "forward" or phase == "backward":
            compute = min(busy - self._busy, elapsed) if phase in meets else elapsed
            self._compute += compute
            self._communication_wait += elapsed - compute
        self._phase, self._wall, self._busy = next_phase, wall, busy
