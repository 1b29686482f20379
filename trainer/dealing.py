"""Evaluation among ranks: the batches of one process, dealt in turn, so that each sample is seen exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from typing import Any

from torch.utils.data import DataLoader

from .combined_loader import CombinedLoader
from .loaders import is_dealt, is_sequence, with_indices
from .sampling import Ranks, drawn
from .seed import derive

Reader = Callable[[int | None], Iterator[tuple[int, Any]]]
"""Reads this rank's share of a loader's first batches, so many of all ranks (None: all), each with its index among
those of all ranks."""


class SideBySide:
    """A combined loader whose batches are structures: what evaluation reads as one loader."""

    def __init__(self, combined: CombinedLoader) -> None:
        self.combined = combined

    def __iter__(self) -> Iterator[Any]:
        for batch, _, _ in self.combined:  # not a generator expression, which would begin to read at once
            yield batch

    def __len__(self) -> int:
        return len(self.combined)


def deals(loader: Any, ranks: Ranks) -> bool:
    """Return whether the batches of an evaluation loader are dealt from outside; otherwise each rank has its own."""
    if isinstance(loader, SideBySide):
        return all(is_dealt(one, ranks) for one in loader.combined.flattened)
    return is_dealt(loader, ranks)


def reader_of(loader: Any, ranks: Ranks, seed: int) -> Reader:
    """Return what reads this rank's batches of an evaluation loader.

    Batch k is read by rank k modulo their number. A loader that yields to each rank its own is taken to yield them in
    turn.
    """
    if ranks.data_size == 1:
        return lambda stop: enumerate(islice(loader, stop))
    if not deals(loader, ranks):
        return _Own(loader, ranks)
    if isinstance(loader, SideBySide):
        return _Passed(loader, ranks, seed)
    return _Picked(loader, ranks) if is_sequence(loader) else _Dealt(loader, ranks, seed)


class _Own:
    """A loader that yields to each rank batches of its own."""

    def __init__(self, loader: Any, ranks: Ranks) -> None:
        self._loader, self._ranks = loader, ranks

    def __call__(self, stop: int | None) -> Iterator[tuple[int, Any]]:
        rank, size = self._ranks.data_rank, self._ranks.data_size
        mine = None if stop is None else len(range(rank, stop, size))
        return zip(count(rank, size), islice(self._loader, mine), strict=False)


class _Picked:
    """A sequence of batches."""

    def __init__(self, loader: Any, ranks: Ranks) -> None:
        self._loader, self._ranks = loader, ranks

    def __call__(self, stop: int | None) -> Iterator[tuple[int, Any]]:
        size = len(self._loader)
        places = range(self._ranks.data_rank, size if stop is None else min(stop, size), self._ranks.data_size)
        return ((place, self._loader[place]) for place in places)


class _Passed:
    """Loaders read side by side: every rank reads all, since one that begins again has no batch k, and skips most."""

    def __init__(self, loader: SideBySide, ranks: Ranks, seed: int) -> None:
        self._loader, self._ranks, self._seed = loader, ranks, seed
        self._num_reads = 0

    def __call__(self, stop: int | None) -> Iterator[tuple[int, Any]]:
        self._num_reads += 1
        batches = drawn(enumerate(self._loader), derive(self._seed, self._num_reads), stop=stop, chunk=1)
        return islice(batches, self._ranks.data_rank, None, self._ranks.data_size)


class _Dealt:
    """A DataLoader with indices: a copy of it reads this rank's batches of indices alone."""

    def __init__(self, loader: DataLoader[Any], ranks: Ranks, seed: int) -> None:
        self._ranks = ranks
        self._turns = _Turns(loader.sampler if loader.batch_sampler is None else loader.batch_sampler, ranks, seed)
        self._loader = with_indices(loader, self._turns)

    def __call__(self, stop: int | None) -> Iterator[tuple[int, Any]]:
        self._turns.stop = stop
        return zip(count(self._ranks.data_rank, self._ranks.data_size), self._loader, strict=False)


class _Turns:
    """What a sampler yields when it is this rank's turn; where it draws random numbers, all ranks draw the same."""

    stop: int | None = None

    def __init__(self, sampler: Iterable[Any], ranks: Ranks, seed: int) -> None:
        self._sampler, self._ranks, self._seed = sampler, ranks, seed
        self._num_reads = 0

    def __iter__(self) -> Iterator[Any]:
        self._num_reads += 1
        entries = drawn(self._sampler, derive(self._seed, self._num_reads), stop=self.stop)
        return islice(entries, self._ranks.data_rank, None, self._ranks.data_size)
