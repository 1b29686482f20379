"""StepClock: divides the time of a rank's optimizer steps into compute, communication wait and data wait."""

from __future__ import annotations

from time import perf_counter, thread_time
from typing import Literal, NamedTuple

import torch

_Phase = Literal["none", "data", "other", "forward", "backward"]


class StepTimes(NamedTuple):
    """Sums of seconds over several steps, and the number of steps."""

    compute: float
    communication_wait: float
    data_wait: float
    num_steps: int


class StepClock:
    """Sums the parts of steps, on the host's clock; a step that was not started costs nothing and does not count.

    Where ranks may wait for each other, compute on a CPU is the processor time of this thread (gloo waits without
    using any), and the rest is waiting. Other devices are synchronized at every mark; there, one rank cannot separate
    the two, and both count as communication wait.

    Args:
        device: of this rank.
        meets: whether ranks wait for each other in a step.
        meets_in_forward: whether they also do so in forward.
    """

    def __init__(self, device: torch.device, *, meets: bool, meets_in_forward: bool) -> None:
        self._device = device
        self.is_exact = device.type == "cpu"
        """Whether marks are cheap, and compute is separated from waiting."""
        self._meets: set[_Phase] = {"forward", "backward"} if meets_in_forward else {"backward"}
        if not meets:
            self._meets.clear()
        self._phase: _Phase = "none"
        self._wall = self._busy = 0.0
        self._compute = self._communication_wait = self._data_wait = 0.0
        self._num_steps = 0

    def start(self) -> None:
        """Begin a step: the time until its first micro-batch is data wait."""
        self._enter("data")

    def begin_micro_batch(self) -> None:
        """Mark that a batch is on the device, and its forward begins."""
        if self._phase != "none":
            self._enter("forward")

    def begin_backward(self) -> None:
        """Mark the end of forward; the rest of the step is backward and update."""
        if self._phase != "none":
            self._enter("backward")

    def interrupt(self) -> None:
        """Mark the begin of something outside steps, which ends the current step."""
        if self._phase == "data":
            self._phase = "other"
        elif self._phase != "other":
            self.end()

    def end(self) -> None:
        """End the step, and count it if it had a micro-batch."""
        if self._phase == "forward" or self._phase == "backward":
            self._enter("none")
            self._num_steps += 1
        self._phase = "none"

    def take(self) -> StepTimes:
        """Return the sums since the last call, and reset them."""
        times = StepTimes(self._compute, self._communication_wait, self._data_wait, self._num_steps)
        self._compute = self._communication_wait = self._data_wait = 0.0
        self._num_steps = 0
        return times

    def _enter(self, next_phase: _Phase) -> None:
        """Add the time since the last mark to the phase that ends now."""
        if not self.is_exact:
            torch.accelerator.synchronize(self._device)
        phase, meets = self._phase, self._meets
        wall = perf_counter()
        # a system call, which takes most of the time of a mark
        busy = thread_time() if self.is_exact and (phase in meets or next_phase in meets) else 0.0
        elapsed = wall - self._wall
        if phase == "data":
            self._data_wait += elapsed
        elif phase == "forward" or phase == "backward":
            compute = min(busy - self._busy, elapsed) if phase in meets else elapsed
            self._compute += compute
            self._communication_wait += elapsed - compute
        self._phase, self._wall, self._busy = next_phase, wall, busy
