"""Audit of a sample ledger: every sample of an epoch is used exactly once, across all ranks and restarts."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise, takewhile
from pathlib import Path
from typing import Final, NamedTuple

import torch

from ...common.errors import DataError
from ...common.sample_order import Source
from ...common.storage import AnyPath, as_path
from .file import FOLDER, CountedTurns, Header, SampleRecord, read_header, read_records

_ALL: Final = -1
_SHOWN: Final = 10


class Where(NamedTuple):
    """A place in the run that trained on a sample."""

    attempt: int
    rank: int
    step: int

    def __str__(self) -> str:
        return f"rank {self.rank} in step {self.step} of attempt {self.attempt}"


class Repeated(NamedTuple):
    """A sample, or consecutive ones, used more often than they should be."""

    what: range
    """The index, or the places in the sampler's order if an index may come several times."""
    wheres: Sequence[Where]


class EpochKey(NamedTuple):
    """One reading of one loader."""

    epoch: int
    loader: int
    lap: int
    """How often the loader had restarted in this epoch, beside a longer one."""
    stream: int
    """The data rank whose own order it is; 0 if all ranks share one."""


@dataclass(frozen=True)
class EpochAudit:
    """The use of the samples of one loader in one epoch."""

    key: EpochKey
    source: Source
    used: int
    """Samples that the weights have seen."""
    skipped: int
    """Samples whose steps were rolled back; their data is not read again."""
    distinct: int
    """Distinct indices among both; 0 if there are no indices."""
    is_finished: bool
    repeated: Sequence[Repeated]
    missing: Sequence[range]
    """Indices, or places if an index may come several times; in an unfinished epoch, those skipped so far."""

    @property
    def is_exact(self) -> bool:
        """Whether nothing came twice and nothing was left out."""
        return not self.repeated and not self.missing

    @property
    def verdict(self) -> str:
        """The result in a word or two."""
        if not self.is_exact:
            return "NOT EXACT"
        if not self.distinct and self.used:
            return "counted"
        return "exact" if self.is_finished else "exact so far"


@dataclass(frozen=True)
class Audit:
    """The audit of a run's ledger."""

    epochs: Sequence[EpochAudit]
    faults: Sequence[str]
    """Gaps in the ledger itself."""

    @property
    def is_exact(self) -> bool:
        """Whether every sample was used as often as it should be, and the ledger is complete."""
        return not self.faults and all(epoch.is_exact for epoch in self.epochs)


def samples_folder(run: str | AnyPath) -> AnyPath:
    """Return the folder of a run's ledger, given the run's folder or the ledger's.

    Raises:
        DataError: if there is no ledger.
    """
    for folder in (as_path(run) / FOLDER, as_path(run)):
        if next(folder.glob("attempt_*.samples"), None) is not None:
            return folder
    raise DataError(
        f"{run} contains no ledger of samples: no {FOLDER}/attempt_*.samples. Give the folder of a run that had "
        "SampleLedger() among its callbacks."
    )


def audit_ledger(folder: Path) -> Audit:
    """Audit the newest attempt and those that led to it; steps that were undone by a kill do not count.

    Raises:
        DataError: for a file that is damaged.
    """
    attempts: dict[int, dict[int, tuple[Path, Header]]] = {}
    for path in sorted(folder.glob("attempt_*.samples")):
        header = read_header(path)
        attempts.setdefault(header.attempt, {})[header.data_rank] = path, header
    newest = attempts[max(attempts)]
    last = newest[min(newest)][1]
    ledger = _Ledger()
    if last.start_step and not last.history:
        ledger.faults.append(f"Steps 1 to {last.start_step} are not in the ledger: it begins where a run was resumed.")
    for counted in [*last.history, CountedTurns(last.attempt, _ALL, _ALL)]:
        if counted.skipped_to:
            ledger.add(counted, attempts.get(counted.attempt, {}))
    return ledger.audit()


@dataclass
class _EpochRecords:
    """The records of one loader in one epoch."""

    source: Source
    used: int = 0
    skipped: int = 0
    stretches: list[tuple[int, int, Where]] = field(default_factory=list)
    """Place, width, and where in the run it was read."""
    indices: array[int] = field(default_factory=lambda: array("q"))
    starts: list[int] = field(default_factory=list)
    """Where the stretches start, in `indices`."""

    def add(self, record: SampleRecord, where: Where, *, is_skipped: bool) -> None:
        count = abs(record.size)
        if is_skipped:
            self.skipped += count
        else:
            self.used += count
        self.stretches.append((record.place, 1 if self.source.in_batches else count, where))
        self.starts.append(len(self.indices))
        self.indices.extend(record.indices)

    def covered(self) -> int:
        """Return the number of places that were read."""
        return max((place + width for place, width, _ in self.stretches), default=0) - sum(map(len, self.gaps(0)))

    def repeated_places(self) -> Iterator[Repeated]:
        """Yield the places that were read more than once."""
        end, before = 0, None
        for place, width, where in sorted(self.stretches):
            if before is not None and min(end, place + width) > place:
                yield Repeated(range(place, min(end, place + width)), [before, where])
            if place + width > end:
                end, before = place + width, where

    def gaps(self, end: int) -> list[range]:
        """Return the unread places before `end` and before the last place that was read."""
        stops = [(place, place + width) for place, width, _ in sorted(self.stretches)]
        reached, missing = 0, list[range]()
        for start, stop in [*stops, (end, end)]:
            if reached < start:
                missing.append(range(reached, start))
            reached = max(reached, stop)
        return missing

    def repeated_indices(self, times: _Times) -> Iterator[Repeated]:
        """Yield the indices that came more than once, or that the data set does not have."""
        values, counts = times
        is_wrong = (counts > 1) | (values < 0) | (values >= self.source.num_indices)
        wrong: dict[int, list[Where]] = {value: [] for value in values[is_wrong].tolist()}
        if not wrong:
            return
        for at in torch.isin(self.tensor(), values[is_wrong]).nonzero()[:, 0].tolist():
            wrong[self.indices[at]].append(self.stretches[bisect_right(self.starts, at) - 1][2])
        yield from (Repeated(range(value, value + 1), wheres) for value, wheres in wrong.items())

    def absent_indices(self, times: _Times) -> list[range]:
        """Return the indices of the data set that never came."""
        values, num_indices = times[0], self.source.num_indices
        present = values[(values >= 0) & (values < num_indices)]  # in order
        before = torch.cat([torch.tensor([-1]), present])
        after = torch.cat([present, torch.tensor([num_indices])])
        is_gap = after - before > 1
        return [range(low + 1, high) for low, high in zip(before[is_gap].tolist(), after[is_gap].tolist(), strict=True)]

    def tensor(self) -> torch.Tensor:
        return torch.tensor(self.indices, dtype=torch.int64)


_Times = tuple[torch.Tensor, torch.Tensor]
"""Indices, and how often each came."""


class _Ledger:
    """The records that count, by epoch and loader."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self._groups: dict[EpochKey, _EpochRecords] = {}

    def add(self, counted: CountedTurns, files: Mapping[int, tuple[Path, Header]]) -> None:
        """Add the records of an attempt."""
        size = next((header.data_size for _, header in files.values()), 1)
        if len(files) < size:
            absent = list(islice((rank for rank in range(size) if rank not in files), _SHOWN))
            more = f" and {size - len(files) - _SHOWN} more" if size - len(files) > _SHOWN else ""
            self.faults.append(
                f"Attempt {counted.attempt} lacks the files of data ranks {absent}{more}; copy them here."
            )
        turns = {path: max((record.turn for record in read_records(path)), default=0) for path, _ in files.values()}
        if counted.last_turn == _ALL:  # a kill may have come before all ranks had recorded their last step
            counted = CountedTurns(counted.attempt, min(turns.values()), min(turns.values()))
        for rank, (path, _) in files.items():
            if turns[path] < counted.skipped_to:
                self.faults.append(
                    f"{path.name} holds {turns[path]} steps of {counted.skipped_to}: it was truncated; restore a copy."
                )
            self._sort(counted, rank, read_records(path))

    def _sort(self, counted: CountedTurns, rank: int, records: Iterable[SampleRecord]) -> None:
        sources: dict[int, Source] = {}
        for record in takewhile(lambda record: record.turn <= counted.skipped_to, records):
            loader = max(record.loader, ~record.loader)
            if record.loader < 0:
                sources[loader] = Source(*record.indices)
            source = sources.get(loader, Source())
            key = EpochKey(record.epoch, loader, record.lap, rank if source.num_streams > 1 else 0)
            group = self._groups.setdefault(key, _EpochRecords(source))
            group.source = source
            if record.size and record.loader >= 0:
                group.add(record, Where(counted.attempt, rank, record.step), is_skipped=record.turn > counted.last_turn)

    def audit(self) -> Audit:
        """Return the audit of all records."""
        keys = sorted(self._groups)
        epochs = sorted({key.epoch for key in keys})
        for before, after in pairwise(epochs):
            if after > before + 1:
                self.faults.append(f"Epochs {before + 1} to {after - 1} are not in the ledger.")
        laps = {key[:2]: key.lap for key in sorted(keys, key=lambda key: key.lap)}
        return Audit([self._audit_epoch(key, epochs[-1], laps[key[:2]]) for key in keys], self.faults)

    def _audit_epoch(self, key: EpochKey, last_epoch: int, laps: int) -> EpochAudit:
        group = self._groups[key]
        source = group.source
        is_finished = key.epoch < last_epoch or key.lap < laps or group.covered() >= source.end >= 0
        # a loader that restarts beside a longer one may stop anywhere
        end = source.end if is_finished and not 0 < key.lap == laps else 0
        times = group.tensor().unique(return_counts=True)
        repeated = group.repeated_indices(times) if source.comes_once else group.repeated_places()
        if source.end < 0:  # a limit or a shorter loader cuts the epoch
            missing = []
        elif source.comes_once and end == source.num_indices:
            missing = group.absent_indices(times)
        else:
            missing = group.gaps(end)
        return EpochAudit(key, source, group.used, group.skipped, len(times[0]), is_finished, list(repeated), missing)
