"""Evaluation among ranks: the batches of one process, dealt in turn, so that each sample is seen exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count, islice
from typing import Any

from torch.utils.data import DataLoader

from .combined_loader import CombinedLoader
from .index_stream import Ranks, drawn
from .loader_kinds import is_dealt, is_sequence, with_indices

Reader = Callable[[int | None, int], Iterator[tuple[int, Any]]]
"""Reads this rank's share of a loader's first batches, so many of all ranks (None: all), each with its index among
those of all ranks. The second number says what random samplers draw on all ranks alike."""


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


def reader_of(loader: Any, ranks: Ranks) -> Reader:
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


def _own(loader: Any, ranks: Ranks, stop: int | None, seed: int) -> Iterator[tuple[int, Any]]:
    """Read a loader that yields to each rank batches of its own."""
    mine = None if stop is None else len(range(ranks.data_rank, stop, ranks.data_size))
    return zip(count(ranks.data_rank, ranks.data_size), islice(loader, mine), strict=False)


def _picked(loader: Any, ranks: Ranks, stop: int | None, seed: int) -> Iterator[tuple[int, Any]]:
    """Read a sequence of batches."""
    places = range(len(loader))[:stop][ranks.data_rank :: ranks.data_size]
    return ((place, loader[place]) for place in places)


def _passed(loader: SideBySide, ranks: Ranks, stop: int | None, seed: int) -> Iterator[tuple[int, Any]]:
    """Read loaders side by side: all of them whole, since one that begins again has no batch k, and pass most over."""
    return islice(drawn(enumerate(loader), seed, stop=stop, chunk=1), ranks.data_rank, None, ranks.data_size)


class _Dealt:
    """Reads a DataLoader with indices: a copy of it, which reads this rank's batches of indices alone."""

    def __init__(self, loader: DataLoader[Any], ranks: Ranks) -> None:
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

    def __init__(self, sampler: Iterable[Any], ranks: Ranks) -> None:
        self._sampler, self._ranks = sampler, ranks

    def __iter__(self) -> Iterator[Any]:
        entries = drawn(self._sampler, self.seed, stop=self.stop)
        return islice(entries, self._ranks.data_rank, None, self._ranks.data_size)
