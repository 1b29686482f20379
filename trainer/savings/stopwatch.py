"""Times of work on a device: of a function that is tried, and of parts of a step that nothing waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter, process_time
from typing import Any, Final

import torch

from ...strategies.devices.kinds import CPU
from ...strategies.devices.queries import synchronize_device
from ...strategies.devices.streams import has_events, recorded_event

try:
    import resource
except ImportError:  # on Windows
    resource = None  # type: ignore[assignment]

_TURNS: Final = 6


def times_of(functions: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Return the seconds that a call of each function takes on a device: the shortest of several, in turns.

    On a CPU these are seconds of processors, in all threads: other programs of the machine do not count.
    """
    clock = process_time if device.type == CPU else perf_counter
    shortest = [float("inf")] * len(functions)
    for turn in range(_TURNS):
        for index, function in enumerate(functions):
            synchronize_device(device)
            began = clock()
            function()
            synchronize_device(device)
            taken = clock() - began
            if turn and taken < shortest[index]:  # the first call allocates and chooses kernels
                shortest[index] = taken
    return [seconds / num_threads(device) for seconds in shortest]


def num_threads(device: torch.device) -> int:
    """Return by how many the processor time of operators on a device is divided to get their duration."""
    return torch.get_num_threads() if device.type == CPU else 1


def num_interruptions() -> int:
    """Return how often other programs of the machine have taken the processor from this one so far."""
    if resource is None:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


class Stopwatch:
    """Takes times between marks: of the processors, or with events where a device runs behind the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._uses_events = has_events(device)
        self._began: Any = None
        self._events: list[tuple[Any, Any]] = []
        self._seconds: list[float] = []
        self.num_times = 0

    def start(self) -> None:
        """Mark the beginning of a time."""
        self._began = self._mark()

    def stop(self) -> None:
        """Mark its end; without a beginning nothing is counted."""
        if self._began is None:
            return
        began, now, self._began = self._began, self._mark(), None
        self.num_times += 1
        if self._uses_events:
            self._events.append((began, now))
        else:
            self._seconds.append((now - began) / num_threads(self._device))

    def typical(self) -> float:
        """Return the median of the times, in seconds; waits for the device."""
        if self._events:
            synchronize_device(self._device)
        self._seconds += [began.elapsed_time(end) / 1000 for began, end in self._events]
        self._events = []
        return median(self._seconds)

    def _mark(self) -> object:
        return recorded_event(self._device, enable_timing=True) if self._uses_events else process_time()
