"""StepClock: divides the time of a rank's optimizer steps into compute, communication wait and data wait."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from time import perf_counter, thread_time
from typing import Any, Literal, NamedTuple

import torch

from ...strategies.devices.streams import has_events, recorded_event

_Phase = Literal["none", "data", "other", "forward", "backward"]


class StepTimes(NamedTuple):
    """Sums of seconds over several steps, and the number of steps."""

    compute: float
    communication_wait: float
    data_wait: float
    num_steps: int


class StepClock:
    """Sums the parts of steps; a step that was not started costs nothing and does not count.

    Where ranks may wait for each other, compute on a CPU is the processor time of this thread (gloo waits without
    using any), and the rest is waiting. Devices with events get one at every mark, and the host never waits for them: a
    step is summed, on the device's clock, once the device has finished it. There, one rank cannot separate compute from
    waiting, and both count as communication wait.

    Args:
        device: the device of this rank.
        meets: whether ranks wait for each other in a step.
        meets_in_forward: whether they also do so in forward.
    """

    def __init__(self, device: torch.device, *, meets: bool, meets_in_forward: bool) -> None:
        self._device = device
        self.is_exact = not has_events(device)
        """Whether marks are cheap, steps are summed as they end, and compute is separated from waiting."""
        self._meets: set[_Phase] = {"forward", "backward"} if meets_in_forward else {"backward"}
        if not meets:
            self._meets.clear()
        self._phase: _Phase = "none"
        self._wall = self._busy = 0.0
        self._compute = self._communication_wait = self._data_wait = 0.0
        self._num_steps = 0
        self._events: list[tuple[_Phase, Any]] = []  # in the current step: each ends a phase
        self._under_way: deque[list[tuple[_Phase, Any]]] = deque()

    def start(self) -> None:
        """Begin a step: the time until its first micro-batch is data wait."""
        self._events = []
        self._enter("data")

    def begin_micro_batch(self) -> None:
        """Mark that a batch is on the device and its forward begins."""
        if self._phase != "none":
            self._enter("forward")

    def begin_backward(self) -> None:
        """Mark the end of forward; the rest of the step is backward and update."""
        if self._phase != "none":
            self._enter("backward")

    def interrupt(self) -> None:
        """Mark the beginning of something outside steps, which ends the current step."""
        if self._phase == "data":
            self._phase = "other"
        elif self._phase != "other":
            self.end()

    def end(self) -> None:
        """End the step, and count it if it had a micro-batch."""
        if self._phase == "forward" or self._phase == "backward":
            self._enter("none")
            if self.is_exact:
                self._num_steps += 1
            else:
                self._under_way.append(self._events)
                self._sum_completed()
        self._phase = "none"

    def take(self) -> StepTimes:
        """Return the sums since the last call, and reset them; a step that is still on the device comes later."""
        self._sum_completed()
        times = StepTimes(self._compute, self._communication_wait, self._data_wait, self._num_steps)
        self._compute = self._communication_wait = self._data_wait = 0.0
        self._num_steps = 0
        return times

    def _enter(self, next_phase: _Phase) -> None:
        """Mark the end of a phase, and begin another."""
        phase, meets = self._phase, self._meets
        self._phase = next_phase
        if not self.is_exact:
            self._events.append((phase, recorded_event(self._device, enable_timing=True)))
            return
        wall = perf_counter()
        # a system call, which takes most of a mark's time
        busy = thread_time() if phase in meets or next_phase in meets else 0.0
        self._add(phase, wall - self._wall, busy - self._busy)
        self._wall, self._busy = wall, busy

    def _add(self, phase: _Phase, elapsed: float, busy: float) -> None:
        """Add the time of a phase to the sums."""
        if phase == "data":
            self._data_wait += elapsed
        elif phase == "forward" or phase == "backward":
            compute = min(busy, elapsed) if phase in self._meets else elapsed
            self._compute += compute
            self._communication_wait += elapsed - compute

    def _sum_completed(self) -> None:
        """Add the steps that the device has completed."""
        while self._under_way and self._under_way[0][-1][1].query():
            for (_, begin), (phase, end) in pairwise(self._under_way.popleft()):
                self._add(phase, begin.elapsed_time(end) / 1000, 0.0)
            self._num_steps += 1
