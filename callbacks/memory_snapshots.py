"""SnapshotInMemory: when a run's state is copied into memory that outlives its processes."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from statistics import median
from typing import Final, Protocol, cast

from torch import nn

from ..strategies.errors import ConfigError
from ..strategies.snapshots.snapshots import SnapshotCost
from .callback import Callback
from .run import Recoverable, Run

_SHARE: Final = 0.0075
"""What snapshots may cost of the time of training; below 1%, as what they take of caches is not measured."""
_FIRST: Final = 3
"""Steps before the first one: it is early, and tells what the others will cost."""
_REMEMBERED: Final = 64
"""Steps of which the times are known."""
_COSTS: Final = 4
"""Earlier snapshots of which the cost is known."""


class Snapshots(Protocol):
    """What the snapshots of a run tell of themselves, see `MemorySnapshots`."""

    cost: SnapshotCost | None
    """What the newest has cost; None while it is under way."""


class SnapshotInMemory(Callback):
    """Take a snapshot of the run every so many steps, from which it goes on when one of its processes dies.

    By default as often as costs less than 1% of the time of training: the first after three steps, from then on as its
    cost and the time of a step say. Ranks look at these together, 1, 2, 4, ... steps after each snapshot, so that all
    have the same interval; what a step takes is the median of the last 64, on the rank where that is least, and what a
    snapshot costs is what it costs where that is most. A run that is interrupted takes one at its last step.

    In `on_train_step_end` and `on_train_last_step`, on all ranks, which communicate there when they look.

    Args:
        snapshots: where they are.
        every: optimizer steps from one to the next; None for as often as costs less than 1%; 0 for never.

    Raises:
        ConfigError: for a number below 0.
    """

    def __init__(self, snapshots: Snapshots, every: int | None = None) -> None:
        if every is not None and every < 0:
            raise ConfigError(f"snapshot_every={every} is not possible; give a number of steps, 0 for never, or None.")
        self.every = every
        self._snapshots = snapshots
        self._has_taken = False
        self._taken_at = 0
        self._next_look = _FIRST
        self._times: deque[float] = deque(maxlen=_REMEMBERED)
        self._last = 0.0
        self._costs: deque[SnapshotCost] = deque(maxlen=_COSTS)

    def on_train_start(self, trainer: Run, module: nn.Module) -> None:
        """Begin to count."""
        self._taken_at = trainer.global_step
        self._next_look = self._taken_at + (_FIRST if self.every is None else self.every)
        self._last = time.perf_counter()

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        """Take a snapshot if it is due."""
        if self.every == 0:
            return
        step = trainer.global_step
        if step < self._taken_at:  # the run went back, and must not come to where it was by a snapshot
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
        """Take one where training is cut short, so that the run that goes on loses nothing."""
        if self.every != 0 and trainer.is_interrupted and self._taken_at != trainer.global_step:
            self._take(trainer)

    def _take(self, trainer: Run) -> None:
        if self._has_taken and self._snapshots.cost is not None:
            self._costs.append(self._snapshots.cost)
        cast(Recoverable, trainer).take_snapshot()
        self._has_taken, self._taken_at = True, trainer.global_step
        self._next_look = self._taken_at + (self.every or 1)
        self._last = time.perf_counter()  # what it took is no part of a step

    def _look(self, trainer: Run) -> int:
        """Return the step at which the next snapshot is due, as far as all ranks know now."""
        cost = self._snapshots.cost
        known = [*self._costs, cost or SnapshotCost()]
        gathering, writing = median(one.gathering for one in known), median(one.writing for one in known)
        own = [float(cost is None), writing, -gathering, -median(self._times)]
        is_under_way, writing, gathering, seconds = trainer.strategy.all_reduce(own, "max")
        if is_under_way:
            return sys.maxsize
        # the rank that waited least for the others tells how long it takes to get the state
        steps: int = math.ceil((writing - gathering) / (_SHARE * -seconds))
        return self._taken_at + max(1, steps)
