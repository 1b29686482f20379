"""Stragglers: finds the slowest of several ranks, and the reason, from their mean step times."""

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
    """Its compute and data wait divided by the median of the others'."""
    cause: Literal["compute", "data_wait"]
    """The part that exceeds the others' by more."""


class Suspicion:
    """Decides when to warn of a slow rank: after several consecutive reports, and once per cause."""

    def __init__(self, threshold: float, patience: int) -> None:
        self._threshold, self._patience = threshold, patience
        self._rank: int | None = None
        self._causes: deque[str] = deque(maxlen=patience)
        self._warned_of: tuple[int, str] | None = None
        self._num_without = 0
        self.num_in_a_row = 0
        """Consecutive reports in which the same rank was the slow one."""

    def should_warn(self, straggler: Straggler) -> bool:
        """Record the slowest rank of a report, and return whether to warn of it now.

        A warning is repeated only after `patience` reports without a straggler.
        """
        if straggler.rank != self._rank or straggler.slowdown <= self._threshold:
            self._causes.clear()
            self.num_in_a_row = 0
        if straggler.slowdown <= self._threshold:
            self._num_without += 1
            self._warned_of = self._warned_of if self._num_without < self._patience else None
            return False
        self._rank, self._num_without = straggler.rank, 0
        self._causes.append(straggler.cause)
        self.num_in_a_row += 1
        if self.num_in_a_row < self._patience or self._warned_of == (straggler.rank, straggler.cause):
            return False
        is_other_rank = self._warned_of is None or self._warned_of[0] != straggler.rank
        if not is_other_rank and len(set(self._causes)) > 1:
            return False
        self._warned_of = straggler.rank, straggler.cause
        return True


def mean_steps(sums: Sequence[StepTimes]) -> dict[int, StepTimes]:
    """Return the mean step of each rank that has completed any, by rank."""
    return {
        rank: StepTimes(compute / num, communication / num, data / num, num)
        for rank, (compute, communication, data, num) in enumerate(sums)
        if num
    }


def split_compute(ranks: dict[int, StepTimes]) -> dict[int, StepTimes]:
    """Separate compute from communication wait on devices where a rank alone cannot.

    The rank with the least time is the one that the others wait for: its time counts as compute on all ranks, and the
    excess of the others as waiting.
    """
    least = min((times.communication_wait for times in ranks.values()), default=0.0)
    return {
        rank: times._replace(compute=times.compute + least, communication_wait=times.communication_wait - least)
        for rank, times in ranks.items()
    }


def find_straggler(ranks: dict[int, StepTimes]) -> Straggler | None:
    """Return the slowest of several ranks; None for one rank."""
    if len(ranks) < 2:
        return None
    own = {rank: times.compute + times.data_wait for rank, times in ranks.items()}
    slowest = max(own, key=lambda rank: own[rank])
    others = [other for rank, other in ranks.items() if rank != slowest]
    usual = median(own[rank] for rank in own if rank != slowest)
    times = ranks[slowest]
    excess_compute = times.compute - median(other.compute for other in others)
    excess_data_wait = times.data_wait - median(other.data_wait for other in others)
    cause: Literal["compute", "data_wait"] = "compute" if excess_compute >= excess_data_wait else "data_wait"
    return Straggler(slowest, own[slowest] / max(usual, 1e-9), cause)
