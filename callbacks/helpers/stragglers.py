"""Stragglers: which of several ranks is the slow one, and why, by their mean steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Literal, NamedTuple

from .step_clock import StepTimes


class Straggler(NamedTuple):
    """The slowest of several ranks."""

    rank: int
    slowdown: float
    """Its own time, compute and waiting for data, over the median of the others'."""
    cause: Literal["compute", "data_wait"]
    """Which part is further above the others'."""


class Suspicion:
    """Which rank has been slow for so many reports that it is to be told, once for each reason."""

    def __init__(self, threshold: float, patience: int) -> None:
        self._threshold, self._patience = threshold, patience
        self._rank: int | None = None
        self._causes: deque[str] = deque(maxlen=patience)
        self._told: tuple[int, str] | None = None
        self._num_without = 0
        self.num_in_a_row = 0
        """Reports in which the rank has been the slow one."""

    def is_to_be_told(self, found: Straggler) -> bool:
        """Take a report's slowest rank into account, and return whether to warn of it now.

        What has been told is told again after it was over for as many reports as it takes to be told.
        """
        if found.rank != self._rank or found.slowdown <= self._threshold:
            self._causes.clear()
            self.num_in_a_row = 0
        if found.slowdown <= self._threshold:
            self._num_without += 1
            self._told = self._told if self._num_without < self._patience else None
            return False
        self._rank, self._num_without = found.rank, 0
        self._causes.append(found.cause)
        self.num_in_a_row += 1
        if self.num_in_a_row < self._patience or self._told == (found.rank, found.cause):
            return False
        is_other_rank = self._told is None or self._told[0] != found.rank
        if not is_other_rank and len(set(self._causes)) > 1:
            return False
        self._told = found.rank, found.cause
        return True


def mean_steps(sums: Sequence[StepTimes]) -> dict[int, StepTimes]:
    """Return the mean step of each rank, by rank; those that have had none are left out."""
    return {
        rank: StepTimes(compute / num, communication / num, data / num, num)
        for rank, (compute, communication, data, num) in enumerate(sums)
        if num
    }


def share_out(ranks: dict[int, StepTimes]) -> dict[int, StepTimes]:
    """Tell compute from communication wait, where a rank by itself cannot: who waits least is the one waited for.

    What the others have above its time is waiting; so much as it has, all of them compute.
    """
    least = min((times.communication_wait for times in ranks.values()), default=0.0)
    return {
        rank: times._replace(compute=times.compute + least, communication_wait=times.communication_wait - least)
        for rank, times in ranks.items()
    }


def find_straggler(ranks: dict[int, StepTimes]) -> Straggler | None:
    """Return the slowest of several ranks; None if there are no others."""
    if len(ranks) < 2:
        return None
    own = {rank: times.compute + times.data_wait for rank, times in ranks.items()}
    slowest = max(own, key=lambda rank: own[rank])
    others = [times for rank, times in ranks.items() if rank != slowest]
    usual = median(own[rank] for rank in own if rank != slowest)
    mine = ranks[slowest]
    more_compute = mine.compute - median(times.compute for times in others)
    more_waiting = mine.data_wait - median(times.data_wait for times in others)
    cause: Literal["compute", "data_wait"] = "compute" if more_compute >= more_waiting else "data_wait"
    return Straggler(slowest, own[slowest] / max(usual, 1e-9), cause)
