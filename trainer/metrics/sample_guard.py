"""SampleGuard: the samples that metric objects have seen in an epoch, compared with those that the loader gave."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ...callbacks.run import Stage
from ...strategies import Strategy


class Tally(NamedTuple):
    """One rank's updates of a metric object in the micro-batches of an epoch; all numbers, so that it can be sent."""

    data_rank: float
    """Ranks that read the same samples have the same, and count once."""
    num: float = 0.0
    """Micro-batches; NaN if nobody can tell how often the metric was updated in them."""
    samples: float = 0.0
    """The samples that the loader gave for them."""
    seen: float = 0.0
    """The same, each as often as the metric was updated in its micro-batch."""
    fewest: float = math.inf
    """The smallest number of updates in a micro-batch, leaving aside those in which nothing was logged, either."""
    num_fewest: float = 0.0
    """Micro-batches with that number of updates."""
    num_silent: float = 0.0
    """Micro-batches without an update in which nothing was logged: the module's step has not run, or left early."""
    num_stray: float = 0.0
    """Updates where this rank had no micro-batch."""


WIDTH: Final = len(Tally._fields)
"""The numbers of a tally."""


class SampleDifference(NamedTuple):
    """The samples that a metric has seen on all ranks, and those that the loader gave, times `updates` a batch."""

    seen: int
    samples: int
    updates: int


def difference(tallies: Sequence[Tally]) -> SampleDifference | None:
    """Return how the samples that a metric has seen differ from the loader's, if that points to a fault of the run.

    A module may update a metric in some batches only, several times in each, or more often in some than in others.
    It is a fault if it was updated equally often, at least once, in most micro-batches of all ranks, and in the others
    (at most one a rank, or a tenth) more often, or not at all though each step logs something else.
    """
    of_ranks: dict[float, Tally] = {}
    for tally in tallies:
        if tally.num or tally.num_stray:
            of_ranks.setdefault(tally.data_rank, tally)
    counted = list(of_ranks.values())
    num, samples, seen = (sum(column) for column in list(zip(*counted, strict=True))[1:4]) if counted else (0.0,) * 3
    updates = min((tally.fewest for tally in counted), default=0.0)
    if not num > 0 or not 1 <= updates < math.inf:  # NaN: nobody can tell
        return None
    usual = sum(tally.num_fewest for tally in counted if tally.fewest == updates)
    stray = sum(tally.num_stray for tally in counted)
    others = num - usual + stray
    if not others or others > max(len(counted), num / 10) or 2 * usual <= num:
        return None
    if len(counted) == 1 and counted[0].num_silent:  # a step may leave out a batch; only ranks can lose one
        return None
    return SampleDifference(round(seen + stray * samples / num), round(samples * updates), round(updates))


@dataclass(slots=True)
class _Watch:
    """A metric object that was logged in a batch, and how often it was updated in each micro-batch since."""

    name: str
    metric: object
    loader: int | None
    last: int
    """Its number of updates when it was last looked at."""
    before: int
    """Its number of updates at its first log, in this micro-batch or earlier."""
    first: tuple[int, int, int] | None = None
    """Micro-batches, samples and later updates of the window in which it was first logged."""
    num: int = 0
    samples: int = 0
    seen: float = 0.0
    num_silent: int = 0
    num_stray: int = 0
    is_known: bool = True
    is_new: bool = True
    calls: Counter[int] = field(default_factory=Counter)
    """Micro-batches by their number of updates."""

    def new_calls(self) -> int:
        """Return the number of updates since the last look."""
        count = updates_of(self.metric) or 0
        calls, self.last = count - self.last, count
        if calls < 0:  # the user has reset it
            self.is_known = False
        return max(calls, 0)

    def note(self, num: int, size: int, *, has_logged: bool) -> None:
        """Count what happened in a window, which may have no micro-batch."""
        calls = self.new_calls()
        if num == 0:
            self.num_stray += calls
        elif self.is_new:
            self.is_new, self.first = False, (num, size, calls)
        else:
            self.add(num, size, calls, is_silent=not has_logged)

    def add(self, num: int, size: int, calls: int, *, is_silent: bool) -> None:
        """Count the updates in a window's micro-batches."""
        self.num += num
        self.samples += size
        if is_silent and not calls:
            self.num_silent += num
            return
        self.seen += calls * size / num
        each, rest = divmod(calls, num)
        self.calls[each] += num - rest
        if rest:
            self.calls[each + 1] += rest

    def forget(self) -> None:
        """Forget the epoch, and look at the metric anew."""
        self.last, self.before, self.first, self.is_new = updates_of(self.metric) or 0, 0, None, False
        self.num = self.samples = self.num_silent = self.num_stray = 0
        self.seen, self.is_known = 0.0, True
        self.calls.clear()

    def tally(self, data_rank: int) -> Tally:
        """Return the tally of the epoch."""
        if self.first is not None:
            num, size, after = self.first
            usual = min(self.calls, default=1)
            # what a metric had before its first log may be of another epoch, unless it is what is usual
            if self.before <= usual * num:
                self.add(num, size, self.before + after, is_silent=False)
            self.first = None
        if not self.is_known:
            return Tally(data_rank, math.nan)
        fewest = min(self.calls, default=math.inf)
        num_fewest = self.calls[int(fewest)] if self.calls else 0
        return Tally(
            *(data_rank, self.num, self.samples, self.seen, fewest, num_fewest, self.num_silent, self.num_stray)
        )


class SampleGuard:
    """Compares, at the end of each epoch, what a metric object has seen with what the loader gave.

    It reads the metric's own ``update_count``, at the end of each optimizer step and each evaluation batch, and leaves
    the metric alone; an object without one is not watched. `difference` says what is a fault. The tallies travel with
    the values of the epoch, so ranks that log other metrics, or none, call the same collectives.

    Args:
        strategy: the strategy of the ranks, connected.
    """

    __slots__ = ("_has_begun", "_open", "_stage", "_strategy", "_warned", "epoch", "watches")

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._stage: Stage = "train"
        self._open: tuple[int | None, int] | None = None
        """Loader and samples of the evaluation batch that runs."""
        self._has_begun: set[Stage] = set()
        """Evaluations in whose epoch this rank had a batch."""
        self._warned: set[tuple[Stage, str]] = set()
        self.epoch = 0
        """The epoch of training, for the warning."""
        self.watches: dict[Stage, dict[str, _Watch]] = {}
        """Watched metrics of each stage; empty in a run without metric objects."""

    def watch(self, key: str, name: str, metric: object, loader: int | None) -> None:
        """Watch a metric object that is logged for the first time, in a batch of the current stage."""
        count = updates_of(metric)
        if count is not None:
            self.watches.setdefault(self._stage, {})[key] = _Watch(name, metric, loader, last=count, before=count)

    def enter(self, stage: Stage) -> None:
        """Look at the metrics of this stage from now on; another stage may have updated them, too."""
        self._stage, self._open = stage, None
        for watch in self.watches.get(stage, {}).values():
            watch.last = updates_of(watch.metric) or 0

    def forget(self) -> None:
        """Forget the current stage's epoch."""
        self._open = None
        self._has_begun.discard(self._stage)
        for watch in self.watches.get(self._stage, {}).values():
            watch.forget()

    def stop_watching(self) -> None:
        """Leave the current stage's metrics alone until they are logged again."""
        self.watches.pop(self._stage, None)

    def leave_out(self) -> None:
        """Say that the module's step runs more than once on purpose, so that updates of this epoch tell nothing."""
        for watch in self.watches.get(self._stage, {}).values():
            watch.is_known = False

    # --- micro-batches -----------------------------------------------------------------------------------------------

    def begin_batch(self, loader: int | None, size: int, *, has_logged: bool) -> None:
        """Begin an evaluation batch; `has_logged` says whether anything was logged in the one before."""
        if self._open is not None:
            self._end_batch(has_logged=has_logged)
        elif self._stage in self.watches:
            self.enter(self._stage)
        self._open = loader, size
        self._has_begun.add(self._stage)

    def end_loader(self, loader: int | None, *, has_logged: bool) -> None:
        """End the last batch of an evaluation loader; this rank may have had none."""
        if self._open is not None:
            self._end_batch(has_logged=has_logged)
            return
        for watch in self.watches.get(self._stage, {}).values():
            calls = watch.new_calls()
            watch.num_stray += calls if watch.loader == loader else 0

    def _end_batch(self, *, has_logged: bool) -> None:
        assert self._open is not None
        (loader, size), self._open = self._open, None
        for watch in self.watches.get(self._stage, {}).values():
            if watch.loader == loader:
                watch.note(1, size, has_logged=has_logged)
            else:
                watch.new_calls()

    def end_window(self, num: int, size: int, *, has_logged: bool, is_whole: bool) -> None:
        """End the micro-batches of an optimizer step on this rank, possibly none; of a part nobody knows the number."""
        if not is_whole:
            self.enter(self._stage)
            return
        for watch in self.watches.get("train", {}).values():
            watch.note(num, size, has_logged=has_logged)

    # --- the end of an epoch -----------------------------------------------------------------------------------------

    def tally(self, key: str, metric: object = None) -> Tally:
        """Return this rank's tally of a metric; of one that it has never logged, if it was reset before the epoch."""
        data_rank = self._strategy.data_rank
        watch = self.watches.get(self._stage, {}).get(key)
        if watch is not None:
            return watch.tally(data_rank)
        if self._stage == "train" or self._stage in self._has_begun:
            return Tally(data_rank)
        return Tally(data_rank, num_stray=updates_of(metric) or 0)

    def compare_own(self) -> None:
        """Compare the metrics of a run with one rank."""
        for key, watch in self.watches.get(self._stage, {}).items():
            self.compare(watch.name, [self.tally(key)])

    def compare(self, name: str, tallies: Sequence[Tally]) -> None:
        """Warn once about a metric that has seen other samples than the loader gave, on rank 0."""
        found = None if (self._stage, name) in self._warned else difference(tallies)
        if found is None:
            return
        self._warned.add((self._stage, name))
        if self._strategy.rank:
            return
        often = "" if found.updates == 1 else f" ({found.updates} updates in each batch)"
        warnings.warn(
            f"The metric logged as {name!r} has seen {found.seen} samples in stage {self._stage!r} of epoch "
            f"{self.epoch}, but the loader gave {found.samples}{often}: it was updated too often, or not at all, for a "
            "few batches, and its value is wrong. Look for a hook or callback that updates it or calls the step, and "
            "for a step that returns early; if there is none, report this with the strategy and the number of ranks.",
            stacklevel=2,
        )


def updates_of(metric: object) -> int | None:
    """Return how often a metric was updated since it was reset, None if it does not tell."""
    count = getattr(metric, "update_count", None)
    return count if isinstance(count, int) else None
