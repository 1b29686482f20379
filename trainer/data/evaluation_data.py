"""EvaluationData: the loaders of an evaluation, whose batches are dealt to the ranks in turn, each sample once."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any

from torch.utils.data import DataLoader

from .combined_loader import CombinedLoader, combined_of
from .index_stream import DataRanks, drawn, length_of
from .limits import Count, limited
from .loader_kinds import check_loader, is_dealt, is_sequence, unshuffled, with_indices
from .seed import derive

Reader = Callable[[int | None, int], Iterator[tuple[int, Any]]]
"""Reads this rank's batches of a loader, each with its index among those of all ranks. The arguments are the number of
batches of all ranks (None: all of them) and a seed for random samplers, the same on all ranks."""


class SideBySide:
    """A combined loader whose batches are structures: what evaluation reads as one loader."""

    def __init__(self, combined: CombinedLoader) -> None:
        self.combined = combined

    def __iter__(self) -> Iterator[Any]:
        for batch, _, _ in self.combined:  # not a generator expression, which would begin to read at once
            yield batch

    def __len__(self) -> int:
        return len(self.combined)


def deals(loader: Any, ranks: DataRanks) -> bool:
    """Return whether the batches of an evaluation loader are dealt from outside; otherwise each rank has its own."""
    if isinstance(loader, SideBySide):
        return all(is_dealt(one, ranks) for one in loader.combined.flattened)
    return is_dealt(loader, ranks)


def reader_of(loader: Any, ranks: DataRanks) -> Reader:
    """Return what reads this rank's batches of an evaluation loader.

    Batch k is read by rank k modulo their number. A loader that yields to each rank its own is taken to yield them in
    turn.
    """
    if ranks.data_size == 1:
        return lambda stop, _: enumerate(islice(loader, stop))
    if not deals(loader, ranks):
        return partial(_own, loader, ranks)
    if isinstance(loader, SideBySide):
        return partial(_passed, loader, ranks)
    return partial(_picked, loader, ranks) if is_sequence(loader) else _Dealt(loader, ranks)


def _own(loader: Any, ranks: DataRanks, stop: int | None, seed: int) -> Iterator[tuple[int, Any]]:
    """Read a loader that yields to each rank batches of its own."""
    mine = None if stop is None else len(range(ranks.data_rank, stop, ranks.data_size))
    return zip(count(ranks.data_rank, ranks.data_size), islice(loader, mine), strict=False)


def _picked(loader: Any, ranks: DataRanks, stop: int | None, seed: int) -> Iterator[tuple[int, Any]]:
    """Read a sequence of batches."""
    places = range(len(loader))[:stop][ranks.data_rank :: ranks.data_size]
    return ((place, loader[place]) for place in places)


def _passed(loader: SideBySide, ranks: DataRanks, stop: int | None, seed: int) -> Iterator[tuple[int, Any]]:
    """Read loaders side by side: all of them whole, since one that begins again has no batch k, and pass most over."""
    return islice(drawn(enumerate(loader), seed, stop=stop, chunk=1), ranks.data_rank, None, ranks.data_size)


class _Dealt:
    """Reads a DataLoader with indices: a copy of it, which reads this rank's batches of indices alone."""

    def __init__(self, loader: DataLoader[Any], ranks: DataRanks) -> None:
        self._ranks = ranks
        self._turns = _Turns(loader.sampler if loader.batch_sampler is None else loader.batch_sampler, ranks)
        self._loader = with_indices(loader, self._turns)

    def __call__(self, stop: int | None, seed: int) -> Iterator[tuple[int, Any]]:
        self._turns.stop, self._turns.seed = stop, seed
        return zip(count(self._ranks.data_rank, self._ranks.data_size), self._loader, strict=False)


class _Turns:
    """What a sampler yields when it is this rank's turn; where it draws random numbers, all ranks draw the same."""

    stop: int | None = None
    seed = 0

    def __init__(self, sampler: Iterable[Any], ranks: DataRanks) -> None:
        self._sampler, self._ranks = sampler, ranks

    def __iter__(self) -> Iterator[Any]:
        entries = drawn(self._sampler, self.seed, stop=self.stop)
        return islice(entries, self._ranks.data_rank, None, self._ranks.data_size)


@dataclass(frozen=True)
class EvaluationData:
    """The loaders of a validation, test or prediction, and how many batches are read of each."""

    loaders: list[Any]
    num_batches: list[Count]
    """Of all ranks."""
    readers: list[Reader]
    seed: int = 0
    source: Any = None
    """The loaders as they were given."""

    @classmethod
    def of(
        cls, source: Any, limit: int | float, stage: str, *, in_order: bool = False, ranks: DataRanks, seed: int = 0
    ) -> EvaluationData:
        """Take one loader, or a nested list or dict of them, one after the other; limit 0 takes none.

        With `in_order` a shuffle is ignored (overfit_batches). `seed` is that of samplers that are dealt to several
        ranks, the same on all.
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
            loaders = [unshuffled(loader) for loader in loaders]
        name = {"validate": "limit_val_batches"}.get(stage, f"limit_{stage}_batches")
        counts = [limited(limit, _length_on_all(loader, ranks), name, stage) for loader in loaders]
        if limit and 0 in counts:
            at = counts.index(0)
            warnings.warn(
                f"Loader {at} to {stage} has no batches ({loaders[at]!r:.60}); nothing is read of it.", stacklevel=2
            )
        return cls(loaders, counts, [reader_of(loader, ranks) for loader in loaders], seed, source)

    def batches(self, dataloader_idx: int, limit: float, step: int) -> Iterator[tuple[int, Any]]:
        """Return this rank's batches of a loader, each with its index among those of all ranks.

        What the ranks read together are the batches of one process, each once. The limit is the largest number of
        batches of all ranks. On several ranks a random order is a function of seed and step.
        """
        count = min(self.num_batches[dataloader_idx], limit)
        stop = None if count == math.inf else int(count)
        return self.readers[dataloader_idx](stop, derive(self.seed, step, dataloader_idx))


def _length_on_all(loader: Any, ranks: DataRanks) -> int | None:
    """Return how many batches all ranks read of an evaluation loader, at most; None if that is not known."""
    length = length_of(loader)
    if ranks.data_size == 1 or deals(loader, ranks):
        return length
    length = ranks.longest(length)
    return None if length is None else length * ranks.data_size
