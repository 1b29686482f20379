"""Which samples of which global batch this rank reads: a function of seed, epoch and position alone."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, SupportsIndex

import torch

from .seed import RngStream, derive, seed_generators


class Order(Protocol):
    """The entries of an epoch (indices of samples, or of whole batches), from any position on."""

    def entries(self, epoch: int, start: int) -> Iterator[Any]:
        """Yield the entries of an epoch, without the first `start`."""

    def size(self) -> int | None:
        """Return how many entries an epoch has; None if nobody knows."""


@dataclass(frozen=True)
class Sequential:
    """Every index in order."""

    num_samples: int

    def entries(self, epoch: int, start: int) -> Iterator[int]:
        return iter(range(start, self.num_samples))

    def size(self) -> int:
        return self.num_samples


@dataclass(frozen=True)
class Shuffled:
    """Every index once, permuted anew for each epoch."""

    num_samples: int
    seed: int

    def entries(self, epoch: int, start: int) -> Iterator[int]:
        generator = torch.Generator().manual_seed(derive(self.seed, epoch))
        indices: list[int] = torch.randperm(self.num_samples, generator=generator)[start:].tolist()
        return iter(indices)

    def size(self) -> int:
        return self.num_samples


@dataclass(frozen=True)
class Sampled:
    """What a user's sampler or batch sampler yields, with random numbers of its own that begin anew each epoch."""

    sampler: Iterable[Any]
    seed: int

    def entries(self, epoch: int, start: int) -> Iterator[Any]:
        set_epoch(self.sampler, epoch)
        own_rng = RngStream(derive(self.seed, epoch))
        with own_rng:
            entries = islice(self.sampler, start, None)
        while True:
            with own_rng:
                chunk = list(islice(entries, 64))
            if not chunk:
                return
            yield from chunk

    def size(self) -> int | None:
        return length_of(self.sampler)


class SeededIndices(list[int]):
    """The indices of a micro-batch; reading one seeds the random generators for that sample.

    So a random augmentation depends on the seed, the epoch and the sample's place in it: not on the number of workers
    or ranks, nor on a restart.
    """

    def __init__(self, indices: Iterable[int], seed: int, place: int) -> None:
        super().__init__(indices)
        self.seed = seed
        self.place = place

    def __iter__(self) -> Iterator[int]:
        for offset, index in enumerate(super().__iter__()):
            seed_generators(derive(self.seed, self.place + offset))
            yield index

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return _arrive, (self[:], self.seed, self.place)


def _arrive(indices: list[int], seed: int, place: int) -> SeededIndices:
    """Unpickle indices in a worker, and seed it: for a data set whose ``__getitems__`` does not iterate over them."""
    seed_generators(derive(seed, place))
    return SeededIndices(indices, seed, place)


@dataclass(frozen=True)
class Share:
    """How a global batch is cut: into ranks, and each rank's part into micro-batches."""

    global_batch_size: int
    """In entries of the order."""
    micro_batch_size: int | None
    """In entries; None where an entry is a batch already."""
    data_rank: int = 0
    data_size: int = 1

    def of(self, num_entries: int) -> slice:
        """Return this rank's part of a global batch with so many entries."""
        return slice(
            num_entries * self.data_rank // self.data_size, num_entries * (self.data_rank + 1) // self.data_size
        )

    def num_micro_batches(self, num_entries: int) -> int:
        """Return into how many micro-batches this rank's part of such a global batch is cut."""
        part = len(range(num_entries)[self.of(num_entries)])
        return math.ceil(part / (self.micro_batch_size or 1))


class IndexStream:
    """The batch sampler behind every training loader: this rank's micro-batches from a position on.

    `sizes` receives, for every micro-batch yielded, its number of samples and by how many entries the position of all
    ranks advances with it.
    """

    def __init__(self, order: Order, share: Share, *, seed: int, drop_last: bool, is_seeded: bool) -> None:
        self._order = order
        self._share = share
        self._seed = seed
        self._drop_last = drop_last
        self._is_seeded = is_seeded
        self.sizes: deque[tuple[int | None, int]] = deque()
        self.seek(0, 0)

    def seek(self, epoch: int, start: int) -> None:
        """Let the next iteration begin at this position."""
        self._epoch, self._start = epoch, start

    def recut(self, share: Share) -> None:
        """Cut global batches in another way from the next iteration on."""
        self._share = share

    def __iter__(self) -> Iterator[Any]:
        self.sizes.clear()
        entries = self._order.entries(self._epoch, self._start)
        place = self._start
        while global_batch := list(islice(entries, self._share.global_batch_size)):
            if self._drop_last and len(global_batch) < self._share.global_batch_size:
                return
            yield from self._cut(global_batch, place)
            place += len(global_batch)

    def _cut(self, global_batch: list[Any], place: int) -> Iterator[Any]:
        part = self._share.of(len(global_batch))
        width = self._share.micro_batch_size or 1
        starts = range(part.start, part.stop, width)
        for start in starts:
            entries = global_batch[start : min(start + width, part.stop)]
            advance = len(global_batch) if start == starts[-1] else 0
            yield self._micro_batch(entries, place + start, advance)

    def _micro_batch(self, entries: list[Any], place: int, advance: int) -> Any:
        batch = entries if self._share.micro_batch_size is not None else entries[0]
        self.sizes.append((len(batch) if isinstance(batch, list) else None, advance))
        if self._is_seeded and isinstance(batch, list):
            # a ready-made batch is one entry: its samples' places are those inside it
            seed = derive(self._seed, self._epoch, *(() if batch is entries else (place,)))
            return SeededIndices(batch, seed, place if batch is entries else 0)
        return batch

    def __len__(self) -> int:
        size = self.num_batches()
        if size is None:
            raise TypeError("the sampler has no length")
        return size

    def num_batches(self) -> int | None:
        """Return the number of this rank's micro-batches in a whole epoch; None if the sampler has no length."""
        size = self._order.size()
        if size is None:
            return None
        whole, rest = divmod(size, self._share.global_batch_size)
        count = whole * self._share.num_micro_batches(self._share.global_batch_size)
        return count if self._drop_last else count + self._share.num_micro_batches(rest)


def length_of(data: object) -> int | None:
    """Return ``len(data)``; None for what has none."""
    if not isinstance(data, Sized):
        return None
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def set_epoch(data: object, epoch: int) -> None:
    """Tell a sampler, data set or loader the epoch, if it wants to know."""
    told = getattr(data, "set_epoch", None)
    if callable(told):
        told(epoch)
