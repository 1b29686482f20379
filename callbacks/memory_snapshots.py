"""SnapshotInMemory: copies a run's state, at the right times, into memory that outlives its processes."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from statistics import median
from typing import Final, Protocol, cast

from torch import nn

from ..common.errors import ConfigError
from ..strategies.snapshots.snapshots import SnapshotCost
from .callback import Callback
from .run import Recoverable, Run

_COST: Final = 0.0075
"""Fraction of the training time that snapshots may cost; below 1%, as their effect on caches is not measured."""
_FIRST: Final = 3
"""Steps before the first snapshot, which comes early and shows what the others will cost."""
_REMEMBERED: Final = 64
"""Number of steps whose times are kept."""
_COSTS: Final = 4
"""Number of earlier snapshots whose costs are kept."""


class Snapshots(Protocol):
    """The cost of a run's snapshots; see `MemorySnapshots`."""

    cost: SnapshotCost | None
    """The cost of the newest snapshot; None while it is being written."""


class SnapshotInMemory(Callback):
    """Takes snapshots of the run, from which it resumes when one of its processes dies.

    By default they cost less than 1% of the training time: the first comes after three steps, the others at an interval
    that follows from their cost and the step time. Ranks agree on the interval 1, 2, 4, ... steps after each snapshot:
    the step time is the median of the last 64 steps on the fastest rank, and the cost that on the slowest. An
    interrupted run takes a snapshot at its last step.

    Works in `on_train_step_end` and `on_train_last_step`, on all ranks, and communicates there.

    Args:
        snapshots: the snapshots of this round.
        every: optimizer steps between snapshots; None keeps their cost below 1%; 0 for no snapshots.

    Raises:
        ConfigError: if `every` is negative.
    """

    def __init__(self, snapshots: Snapshots, every: int | None = None) -> None:
        if every is not None and every < 0:
            raise ConfigError(f"snapshot_every must be >= 0 (0 for no snapshots) or None, got {every}.")
        self.every = every
        self._snapshots = snapshots
        self._has_taken = False
        self._taken_at = 0
        self._next_look = _FIRST
        self._times: deque[float] = deque(maxlen=_REMEMBERED)
        self._last = 0.0
        self._costs: deque[SnapshotCost] = deque(maxlen=_COSTS)

    def on_train_start(self, trainer: Run, module: nn.Module) -> None:
        """Start counting steps."""
        self._taken_at = trainer.global_step
        self._next_look = self._taken_at + (_FIRST if self.every is None else self.every)
        self._last = time.perf_counter()

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        """Take a snapshot if it is due."""
        if self.every == 0:
            return
        step = trainer.global_step
        if step < self._taken_at:  # after a rollback, older snapshots must not restore the later state
            self._take(trainer)
            return
        if self.every is None:
            now = time.perf_counter()
            self._times.append(now - self._last)
            self._last = now
        if step < self._next_look:
            return
        if self.every is None and self._has_taken and step < (due := self._look(trainer)):
            self._next_look = min(due, 2 * step - self._taken_at)
            return
        self._take(trainer)

    def on_train_last_step(self, trainer: Run, module: nn.Module) -> None:
        """Take a snapshot if training is interrupted, so that the resumed run loses nothing."""
        if self.every != 0 and trainer.is_interrupted and self._taken_at != trainer.global_step:
            self._take(trainer)

    def _take(self, trainer: Run) -> None:
        if self._has_taken and self._snapshots.cost is not None:
            self._costs.append(self._snapshots.cost)
        cast(Recoverable, trainer).take_snapshot()
        self._has_taken, self._taken_at = True, trainer.global_step
        self._next_look = self._taken_at + (self.every or 1)
        self._last = time.perf_counter()  # the time of the snapshot does not belong to a step

    def _look(self, trainer: Run) -> int:
        """Return the step at which the next snapshot is due, by the measurements of all ranks so far."""
        cost = self._snapshots.cost
        costs = [*self._costs, cost or SnapshotCost()]
        gathering, writing = median(cost.gathering for cost in costs), median(cost.writing for cost in costs)
        own = [float(cost is None), writing, -gathering, -median(self._times)]
        is_under_way, writing, gathering, seconds = trainer.strategy.ranks.all.all_reduce(own, "max")
        if is_under_way:
            return sys.maxsize
        # the rank that waited least for the others shows how long collecting the state takes
        steps: int = math.ceil((writing - gathering) / (_COST * -seconds))
        return self._taken_at + max(1, steps)
