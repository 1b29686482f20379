"""EvaluationData: the loaders of an evaluation, whose batches are dealt to the ranks in turn, each sample once."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from ..streams.dealt_loader import can_deal
from .combined_loader import CombinedLoader, combined_of
from .index_stream import DataRanks
from .iterable_stream import deal_stream
from .loader_kinds import (
    begin_iteration,
    check_loader,
    entries_of,
    is_dealt,
    is_indexed,
    unshuffle_loader,
    with_indices,
)
from .own_generators import OwnGenerators
from .sampled import draw_entries, length_of, set_epoch
from .seed import RngStream, derive_seed
from .stream import END, Count, count_within_limit


class EvaluationBatch(NamedTuple):
    """A batch of an evaluation."""

    batch_idx: int
    """Its index among the batches of all ranks."""
    batch: Any
    indices: list[int] | None = None
    """The indices that the loader's sampler drew for it; None if only the batch tells its number of samples."""


Reader = Callable[[int | None, int], Iterator[EvaluationBatch]]
"""Reads this rank's batches from a loader. The arguments are the number of batches for all ranks (None: all of them)
and a seed for random samplers, the same on all ranks."""


class SideBySide:
    """A combined loader whose batches are structures, which evaluation reads as one loader."""

    def __init__(self, combined: CombinedLoader) -> None:
        self.combined = combined

    def __iter__(self) -> Iterator[object]:
        for batch, _, _ in self.combined:  # not a generator expression, which would start reading at once
            yield batch

    def __len__(self) -> int:
        return len(self.combined)


class _Dealt:
    """Reads a DataLoader over a stream, of which each rank and worker is dealt a part."""

    def __init__(self, loader: DataLoader[object], ranks: DataRanks) -> None:
        self._loader, self._ranks, self.deal = loader, ranks, deal_stream(loader, ranks)

    def num_batches(self, seed: int) -> int | None:
        """Return the number of batches for all ranks; None if only reading tells. Collective, as reading is."""
        length = length_of(self._loader)
        if length is None:
            return None
        self.deal.settle(0, seed)
        if self.deal.is_by_shards:
            return None
        if self.deal.is_addressed:
            return length
        length = self._ranks.longest(length)
        return None if length is None else length * self._ranks.data_size

    def __call__(self, stop: int | None, seed: int) -> Iterator[EvaluationBatch]:
        rank, size = self._ranks.data_rank, self._ranks.data_size
        self.deal.settle(0, seed)
        numbers = RngStream(seed)
        with numbers:
            batches = self.deal.batches(0, seed, 0, {})
        places = islice(count(rank, size), None if stop is None else len(range(rank, stop, size)))
        for place in places:
            with numbers:  # what the stream draws does not change the numbers of training
                batch = next(batches, END)
            if batch is END:
                return
            yield EvaluationBatch(place, batch)


def are_batches_dealt(loader: object, ranks: DataRanks) -> bool:
    """Return whether the batches of an evaluation loader are dealt from outside; otherwise each rank has its own."""
    if isinstance(loader, SideBySide):
        return all(is_dealt(one, ranks) for one in loader.combined.flattened)
    return is_dealt(loader, ranks)


def reader_of(loader: Any, ranks: DataRanks) -> Reader:
    """Return the reader of this rank's batches from an evaluation loader.

    Batch k is read by rank k modulo the number of ranks. A loader that yields each rank its own batches is assumed to
    deal them in turn.
    """
    if is_indexed(loader) and (ranks.data_size == 1 or are_batches_dealt(loader, ranks)):
        return _Indexed(loader, ranks)
    if ranks.is_dealing and can_deal(loader):
        return _Dealt(loader, ranks)
    if ranks.data_size == 1:
        return lambda stop, _: map(EvaluationBatch, count(), islice(begin_iteration(loader), stop))
    if not are_batches_dealt(loader, ranks):
        return partial(_read_own_batches, loader, ranks)
    if isinstance(loader, SideBySide):
        return partial(_skip_others_batches, loader, ranks)
    return partial(_pick_batches, loader, ranks)


def _read_own_batches(loader: Any, ranks: DataRanks, stop: int | None, seed: int) -> Iterator[EvaluationBatch]:
    """Read a loader that yields each rank its own batches."""
    mine = None if stop is None else len(range(ranks.data_rank, stop, ranks.data_size))
    return map(EvaluationBatch, count(ranks.data_rank, ranks.data_size), islice(begin_iteration(loader), mine))


def _pick_batches(loader: Any, ranks: DataRanks, stop: int | None, seed: int) -> Iterator[EvaluationBatch]:
    """Read a sequence of batches."""
    places = range(len(loader))[:stop][ranks.data_rank :: ranks.data_size]
    return (EvaluationBatch(place, loader[place]) for place in places)


def _skip_others_batches(
    loader: SideBySide, ranks: DataRanks, stop: int | None, seed: int
) -> Iterator[EvaluationBatch]:
    """Read loaders side by side in full, since one that restarts has no batch k, and skip other ranks' batches."""
    batches = draw_entries(map(EvaluationBatch, count(), loader), seed, stop=stop, chunk=1)
    return islice(batches, ranks.data_rank, None, ranks.data_size)


class _Indexed:
    """Reads a DataLoader with indices, through a copy that reads only this rank's batches of indices."""

    def __init__(self, loader: DataLoader[object], ranks: DataRanks) -> None:
        self._ranks = ranks
        self._turns = _Turns(entries_of(loader), ranks)
        self._loader = with_indices(loader, self._turns)
        # indices are known only if batches come in the order in which they were drawn (DataLoader(in_order=False))
        vars(self._loader)["in_order"] = True

    def __call__(self, stop: int | None, seed: int) -> Iterator[EvaluationBatch]:
        self._turns.stop, self._turns.seed = stop, seed
        places = count(self._ranks.data_rank, self._ranks.data_size)
        # on one rank the sampler is used as it is, and may read ahead of the limit
        batches = islice(begin_iteration(self._loader), stop if self._ranks.data_size == 1 else None)
        for place, batch in zip(places, batches, strict=False):
            entry = self._turns.drawn.popleft() if self._turns.drawn else None
            yield EvaluationBatch(place, batch, entry if isinstance(entry, list) else None)


class _Turns:
    """The entries that a sampler yields on this rank's turns, recorded; random numbers are the same on all ranks.

    On one rank the sampler draws as it would by itself.
    """

    stop: int | None = None
    seed = 0

    def __init__(self, sampler: Iterable[object], ranks: DataRanks) -> None:
        self._sampler, self._ranks = sampler, ranks
        OwnGenerators.of(sampler).follow_first(ranks.share)
        self.drawn: deque[object] = deque()
        """The entries drawn for batches that the loader has not returned yet."""

    def __iter__(self) -> Iterator[object]:
        self.drawn = deque()
        if self._ranks.data_size == 1:
            return map(self._note, self._sampler)
        entries = draw_entries(self._sampler, self.seed, stop=self.stop)
        return map(self._note, islice(entries, self._ranks.data_rank, None, self._ranks.data_size))

    def _note(self, entry: object) -> object:
        self.drawn.append(entry)
        return entry

    @property
    def sampler(self) -> _Turns:
        """The sampler, for loaders that repeat one and ask for its length."""
        return self

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type] # what has none raises TypeError, as it should


@dataclass(frozen=True)
class EvaluationData:
    """The loaders of a validation, test or prediction, and the number of batches to read from each."""

    loaders: list[Any]
    num_batches: list[Count]
    """For all ranks together."""
    readers: list[Reader]
    seed: int = 0
    source: object = None
    """The loaders as given."""

    @classmethod
    def of(
        cls, source: object, limit: int | float, stage: str, *, in_order: bool = False, ranks: DataRanks, seed: int = 0
    ) -> EvaluationData:
        """Read one loader, or a nested list or dict of them, one after the other; limit 0 reads none.

        With `in_order` a shuffle is ignored (overfit_batches). `seed` is for samplers that are dealt to several ranks,
        and the same on all.
        """
        combined = combined_of(source)
        if combined is None:
            loaders = [source]
        elif isinstance(source, CombinedLoader) and source.mode != "sequential":
            loaders = [SideBySide(source)]
        else:
            loaders = combined.flattened
        for loader in loaders:
            check_loader(loader, ranks)
        if in_order:
            loaders = [unshuffle_loader(loader) for loader in loaders]
        name = {"validate": "limit_val_batches"}.get(stage, f"limit_{stage}_batches")
        readers = [reader_of(loader, ranks) for loader in loaders]
        lengths = [
            reader.num_batches(seed) if isinstance(reader, _Dealt) else _length_on_all(loader, ranks)
            for loader, reader in zip(loaders, readers, strict=True)
        ]
        counts = [count_within_limit(limit, length, name, stage) for length in lengths]
        if limit and 0 in counts:
            at = counts.index(0)
            warnings.warn(
                f"Loader {at} for {stage} has no batches ({loaders[at]!r:.60}); nothing is read from it.", stacklevel=2
            )
        return cls(loaders, counts, readers, seed, source)

    def batches(self, dataloader_idx: int, limit: float, step: int, epoch: int = 0) -> Iterator[EvaluationBatch]:
        """Return this rank's batches of a loader.

        Together, the ranks read the batches of one process, each once. The limit is the largest number of batches over
        all ranks. On several ranks, a random order is a function of seed and step. Samplers are told the epoch.
        """
        _tell_epoch(self.loaders[dataloader_idx], epoch)
        count = min(self.num_batches[dataloader_idx], limit)
        stop = None if count == math.inf else int(count)
        return self.readers[dataloader_idx](stop, derive_seed(self.seed, step, dataloader_idx))


def _tell_epoch(loader: object, epoch: int) -> None:
    """Tell the samplers of a loader, or of loaders side by side, the epoch."""
    for each in loader.combined.flattened if isinstance(loader, SideBySide) else [loader]:
        batch_sampler = getattr(each, "batch_sampler", None)
        samplers = getattr(each, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)
        for sampler in {id(sampler): sampler for sampler in samplers}.values():
            set_epoch(sampler, epoch)


def _length_on_all(loader: object, ranks: DataRanks) -> int | None:
    """Return the largest number of batches that all ranks read from an evaluation loader; None if unknown."""
    length = length_of(loader)
    if ranks.data_size == 1 or are_batches_dealt(loader, ranks):
        return length
    length = ranks.longest(length)
    return None if length is None else length * ranks.data_size
