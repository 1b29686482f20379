"""SampleGuard: the samples that metric objects have seen in an epoch, compared with those that the loader gave."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
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


_SILENT: Final = -1
"""Instead of a number of updates: none, where nothing was logged, either."""

WIDTH: Final = len(Tally._fields)
"""The numbers of a tally."""


class SampleDifference(NamedTuple):
    """The samples that a metric has seen on all ranks, and those that the loader gave, times `updates` a batch."""

    seen: int
    samples: int
    updates: int


def find_fault(tallies: Sequence[Tally]) -> SampleDifference | None:
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
    """A metric object that was logged in a batch, and how often it was updated in each window since."""

    name: str
    metric: object
    loader: int | None
    last: int
    """Its number of updates when it was last looked at."""
    before: int
    """Its number of updates at its first log, in this window or earlier."""
    first: tuple[int, int, int] | None = None
    """The window in which it was first logged, and its updates from then on."""
    windows: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """How many windows had this number of micro-batches, samples and updates."""
    num_stray: int = 0
    is_known: bool = True
    is_new: bool = True

    def new_updates(self) -> int:
        """Return the number of updates since the last look."""
        count = updates_of(self.metric) or 0
        updates, self.last = count - self.last, count
        if updates < 0:  # the user has reset it
            self.is_known = False
            return 0
        return updates

    def note(self, num: int, size: int, has_logged: Callable[[], bool]) -> None:
        """Count the updates in a window, which may have no micro-batch."""
        updates = self.new_updates()
        if num == 0:
            self.num_stray += updates
        elif self.is_new:
            self.is_new, self.first = False, (num, size, updates)
        else:
            window = num, size, updates if updates or has_logged() else _SILENT
            self.windows[window] = self.windows.get(window, 0) + 1

    def forget(self) -> None:
        """Forget the epoch, and look at the metric anew."""
        self.last, self.first, self.is_new = updates_of(self.metric) or 0, None, False
        self.windows.clear()
        self.num_stray, self.is_known = 0, True

    def tally(self, data_rank: int) -> Tally:
        """Return the tally of the epoch."""
        if not self.is_known:
            return Tally(data_rank, math.nan)
        windows = list(self.windows.items())
        usual = min((updates // num for num, _, updates in self.windows if updates != _SILENT), default=1)
        # what a metric had before its first log may be of another epoch, unless it is what is usual
        if self.first is not None and self.before <= usual * self.first[0]:
            num, size, after = self.first
            windows.append(((num, size, self.before + after), 1))
        by_updates: Counter[int] = Counter()
        samples, seen = 0, 0.0
        for (num, size, updates), times in windows:
            samples += times * size
            seen += times * size * max(updates, 0) / num
            each, rest = divmod(updates, num) if updates != _SILENT else (_SILENT, 0)
            by_updates[each] += times * (num - rest)
            by_updates[each + 1] += times * rest
        num_silent = by_updates.pop(_SILENT, 0)
        counts = +by_updates  # without those that no micro-batch has
        fewest = min(counts, default=math.inf)
        num_fewest = min(counts.items(), default=(0, 0))[1]
        return Tally(
            *(data_rank, counts.total() + num_silent, samples, seen, fewest, num_fewest, num_silent, self.num_stray)
        )


class SampleGuard:
    """Compares, at the end of each epoch, what a metric object has seen with what the loader gave.

    It reads the metric's own ``update_count``, at the end of each optimizer step and each evaluation batch, and leaves
    the metric alone; an object without one is not watched. `find_fault` says what is a fault. The tallies travel with
    the values of the epoch, so ranks that log other metrics, or none, call the same collectives.

    Args:
        strategy: the strategy of the ranks, connected.
    """

    __slots__ = ("_open", "_stage", "_strategy", "_warned", "epoch", "has_begun", "watches")

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._stage: Stage = "train"
        self._open: tuple[int | None, int] | None = None
        """Loader and samples of the evaluation batch that runs, if metrics are watched."""
        self._warned: set[tuple[Stage, str]] = set()
        self.epoch = 0
        """The epoch of training, for the warning."""
        self.has_begun = False
        """Whether this rank has had a batch in the current evaluation."""
        self.watches: dict[Stage, dict[str, _Watch]] = {}
        """Watched metrics of each stage; empty in a run without metric objects."""

    def watch(self, key: str, name: str, metric: object, loader: int | None, size: int) -> None:
        """Watch a metric object that is logged for the first time, in a batch of this size of the current stage."""
        count = updates_of(metric)
        if count is None:
            return
        self.watches.setdefault(self._stage, {})[key] = _Watch(name, metric, loader, last=count, before=count)
        if self._stage != "train":
            self._open = loader, size

    def enter(self, stage: Stage) -> None:
        """Look at the metrics of this stage from now on; another stage may have updated them, too."""
        self._stage, self._open, self.has_begun = stage, None, False
        self._look_anew()

    def forget(self) -> None:
        """Forget the current stage's epoch."""
        self._open, self.has_begun = None, False
        for watch in self._current():
            watch.forget()

    def _current(self) -> Collection[_Watch]:
        return self.watches.get(self._stage, {}).values()

    def _look_anew(self) -> None:
        for watch in self._current():
            watch.last = updates_of(watch.metric) or 0

    def stop_watching(self) -> None:
        """Leave the current stage's metrics alone until they are logged again."""
        self.watches.pop(self._stage, None)

    def leave_out(self) -> None:
        """Say that the module's step runs more than once on purpose, so that updates of this epoch tell nothing."""
        for watch in self._current():
            watch.is_known = False

    # --- micro-batches; `has_logged` says whether anything was logged in the current ones ----------------------------

    def begin_batch(self, loader: int | None, size: int, has_logged: Callable[[], bool]) -> None:
        """Begin an evaluation batch, and end the one before."""
        if self._open is not None:
            self._end_batch(has_logged)
        else:
            self._look_anew()
        self._open = loader, size

    def end_loader(self, loader: int | None, has_logged: Callable[[], bool]) -> None:
        """End the last batch of an evaluation loader; this rank may have had none."""
        if self._open is not None:
            self._end_batch(has_logged)
            return
        for watch in self._current():
            updates = watch.new_updates()
            watch.num_stray += updates if watch.loader == loader else 0

    def _end_batch(self, has_logged: Callable[[], bool]) -> None:
        assert self._open is not None
        (loader, size), self._open = self._open, None
        for watch in self._current():
            if watch.loader == loader:
                watch.note(1, size, has_logged)
            else:
                watch.new_updates()

    def end_window(self, num: int, size: int, has_logged: Callable[[], bool], *, is_whole: bool) -> None:
        """End the micro-batches of an optimizer step on this rank, possibly none; of a part nobody knows the number."""
        if not is_whole:
            self._look_anew()
            return
        for watch in self._current():
            watch.note(num, size, has_logged)

    # --- the end of an epoch -----------------------------------------------------------------------------------------

    def tally(self, key: str, metric: object = None) -> Tally:
        """Return this rank's tally of a metric; of one that it has never logged, if it was reset before the epoch."""
        data_rank = self._strategy.data_rank
        watch = self.watches.get(self._stage, {}).get(key)
        if watch is not None:
            return watch.tally(data_rank)
        if self._stage == "train" or self.has_begun:
            return Tally(data_rank)
        return Tally(data_rank, num_stray=updates_of(metric) or 0)

    def compare_own(self) -> None:
        """Compare the metrics of a run with one rank."""
        for key, watch in self.watches.get(self._stage, {}).items():
            self.compare(watch.name, [self.tally(key)])

    def compare(self, name: str, tallies: Sequence[Tally]) -> None:
        """Warn once about a metric that has seen other samples than the loader gave, on rank 0."""
        found = None if (self._stage, name) in self._warned else find_fault(tallies)
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
