"""IndexStream: the indices that this rank reads from each global batch, determined by seed, epoch and position."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any, ClassVar, Protocol, SupportsIndex, runtime_checkable

import torch

from ...common.sample_order import Source
from .generators import GENERATORS
from .micro_batch import MicroBatch, Window
from .sampled import HEAD, Place, Sampled, Share, first_indices
from .seed import derive_seed, mix_seed, seed_generators


class Order(Protocol):
    """The entries of an epoch (indices of samples or of whole batches), from any position on."""

    comes_once: ClassVar[bool]
    """Whether each index comes once in an epoch; False if a user's sampler decides."""

    @property
    def head(self) -> list[Any]:
        """The first indices of the epoch whose entries were asked for last, as plain values."""

    def entries(self, epoch: int, start: int) -> Iterator[object]:
        """Yield the entries of an epoch, without the first `start`."""

    def size(self) -> int | None:
        """Return the number of entries in an epoch; None if unknown."""


@dataclass(frozen=True)
class Sequential:
    """Every index in order."""

    num_samples: int
    comes_once: ClassVar[bool] = True

    @property
    def head(self) -> list[int]:
        return list(range(min(self.num_samples, HEAD)))

    def entries(self, epoch: int, start: int) -> Iterator[int]:
        return iter(range(start, self.num_samples))

    def size(self) -> int:
        return self.num_samples


class Shuffled:
    """Every index once, in a different permutation in each epoch."""

    comes_once: ClassVar[bool] = True

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples, self.seed = num_samples, seed
        self._head: list[int] = []

    @property
    def head(self) -> list[int]:
        return self._head

    def entries(self, epoch: int, start: int) -> Iterator[int]:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
        permutation = torch.randperm(self.num_samples, generator=generator)
        self._head = permutation[:HEAD].tolist()
        indices: list[int] = permutation[start:].tolist()
        return iter(indices)

    def size(self) -> int:
        return self.num_samples


@runtime_checkable
class AddressedSampler(Protocol):
    """A sampler, or batch sampler, that reads any epoch from any position on, without what comes before."""

    def entries_from(self, epoch: int, start: int, seed: int) -> Iterator[object]:
        """Yield the entries of an epoch, each index at most once, without the first `start`; `seed` is the run's."""

    def __len__(self) -> int:
        """Return the number of entries in an epoch, which is the same for all."""


class Addressed:
    """The entries of a sampler that any position is read from at once: never listed, and with no state to save."""

    comes_once: ClassVar[bool] = True

    def __init__(self, sampler: AddressedSampler, seed: int) -> None:
        self._sampler, self._seed = sampler, seed
        self._head: list[object] = []

    @property
    def head(self) -> list[Any]:
        return self._head

    def entries(self, epoch: int, start: int) -> Iterator[object]:
        self._head = first_indices(islice(self._sampler.entries_from(epoch, 0, self._seed), HEAD))
        return self._sampler.entries_from(epoch, start, self._seed)

    def size(self) -> int:
        return len(self._sampler)


class SeededIndices(list[int]):
    """The indices of a micro-batch; reading one seeds the random generators for that sample.

    So a random augmentation depends on the seed, the epoch and the sample's place in it, but not on the number of
    workers or ranks, or on a restart.
    """

    def __init__(self, indices: Iterable[int], seed: int, place: int) -> None:
        super().__init__(indices)
        self.seed = seed
        """Combined with a sample's place into the seed of that sample."""
        self.place = place

    def __iter__(self) -> Iterator[int]:
        seed, seed_all = self.seed, GENERATORS.seed
        for place, index in enumerate(super().__iter__(), self.place):
            seed_all(mix_seed(seed, place))
            yield index

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        return _unpickle_indices, (self[:], self.seed, self.place)


def _unpickle_indices(indices: list[int], seed: int, place: int) -> SeededIndices:
    """Unpickle indices in a worker, and seed it, for a data set whose ``__getitems__`` does not iterate over them."""
    seed_generators(mix_seed(seed, place))
    return SeededIndices(indices, seed, place)


Agree = Callable[[list[float]], list[list[float]]]
"""Gathers numbers: one row per data rank, in rank order. Collective: every rank calls it."""


@dataclass(frozen=True)
class DataRanks:
    """The ranks that read the data: this one, and how many there are."""

    data_rank: int = 0
    data_size: int = 1
    planned_size: int = 0
    """The number of ranks for which the loaders' batch_size and accumulate_grad_batches were chosen, so that a run that
    continues on a different number keeps its global batch. 0: `data_size`."""
    is_dealing: bool = True
    """Whether one stream is dealt to the ranks; False: the user's loaders yield each rank its own batches."""
    agree: Agree | None = None
    """Needed if only reading tells how much data there is."""
    share: Share | None = None
    """Needed if a sampler has random generators of its own."""

    def gather(self, *numbers: float) -> list[list[float]]:
        """Return the numbers of every rank. Collective: every rank calls it."""
        assert self.agree is not None, "several data ranks need a way to agree"
        return self.agree(list(numbers))

    def longest(self, length: int | None) -> int | None:
        """Return the largest length on any rank; None if one is unknown. Collective: every rank calls it."""
        most = max(row[0] for row in self.gather(math.inf if length is None else length))
        return None if math.isinf(most) else int(most)


@dataclass(frozen=True)
class BatchShare:
    """How a global batch is cut: into one slice per rank, and each slice into micro-batches."""

    global_batch_size: int
    """In entries of the order."""
    micro_batch_size: int | None
    """In entries; None if an entry is already a batch."""
    data_rank: int = 0
    data_size: int = 1

    def of(self, num_entries: int, rank: int | None = None) -> slice:
        """Return this (or another) rank's slice of a global batch of `num_entries`; the first ranks' are largest."""
        rank = self.data_rank if rank is None else rank
        smaller, num_larger = divmod(num_entries, self.data_size)
        start = rank * smaller + min(rank, num_larger)
        return slice(start, start + smaller + (rank < num_larger))

    def cuts(self, num_entries: int) -> list[slice]:
        """Return the slices that are this rank's micro-batches of such a global batch."""
        own, width = self.of(num_entries), self.micro_batch_size or 1
        return [slice(start, min(start + width, own.stop)) for start in range(own.start, own.stop, width)]

    def num_micro_batches(self, num_entries: int) -> int:
        """Return the number of micro-batches in the largest slice of such a global batch."""
        return math.ceil(math.ceil(num_entries / self.data_size) / (self.micro_batch_size or 1))

    def fewest_micro_batches(self, num_entries: int) -> int:
        """Return the number of micro-batches in the smallest slice of such a global batch."""
        return math.ceil(num_entries // self.data_size / (self.micro_batch_size or 1))

    def totals(self, entries: Sequence[object]) -> list[int | None]:
        """Return the samples in the first, second, ... micro-batches of all ranks; None if only reading tells."""
        if self.micro_batch_size is None:
            parts = (entries[self.of(len(entries), rank)] for rank in range(self.data_size))
            return [_num_samples(batches) for batches in zip_longest(*parts, fillvalue=[])]
        width = self.micro_batch_size
        smaller, num_larger = divmod(len(entries), self.data_size)  # slices differ by at most one entry
        starts = range(0, smaller + bool(num_larger), width)
        return [
            (self.data_size - num_larger) * min(max(smaller - start, 0), width)
            + num_larger * min(smaller + 1 - start, width)
            for start in starts
        ]


def _num_samples(batches: Iterable[Any]) -> int | None:
    """Return the number of samples in batches of indices; None if one is not a list of indices."""
    lists = list(batches)
    return sum(map(len, lists)) if all(isinstance(batch, list) for batch in lists) else None


class IndexStream:
    """The batch sampler behind every training loader: it yields the indices of this rank's micro-batches.

    `drawn` receives the `Window` of each global batch before the indices of its first micro-batch are yielded. If this
    rank has no sample in a global batch, its window is empty and nothing is yielded.
    """

    def __init__(self, order: Order, share: BatchShare, *, seed: int, drop_last: bool, is_seeded: bool) -> None:
        self._order = order
        self._share = share
        self._seed = seed
        self._drop_last = drop_last
        self._is_seeded = is_seeded
        self.drawn: deque[Window] = deque()
        self._undrawn: Iterator[Window] | None = None
        """The windows from the position on, while none has been drawn."""
        self.seek(0, 0)

    def seek(self, epoch: int, start: int, num_taken: int = 0) -> None:
        """Make the next iteration begin at this position, without the first micro-batches of this rank's window."""
        self._epoch, self._start, self._num_taken = epoch, start, num_taken
        self._undrawn, self._is_drawn = None, False

    def leave(self, position: int, *, is_over: bool) -> None:
        """Note the position at which reading ends, or has come to."""
        if isinstance(self._order, Sampled):
            self._order.leave(position, is_whole=self._is_whole(position, is_over=is_over))

    def _is_whole(self, position: int, *, is_over: bool) -> bool:
        size = self._order.size()
        return is_over or (size is not None and size - position < self._share.global_batch_size)

    def recut(self, share: BatchShare) -> None:
        """Cut global batches differently from the next iteration on."""
        self._share = share

    def __iter__(self) -> Iterator[object]:
        self.drawn.clear()
        # an iterator of torch with workers asks twice before it draws: the sampler begins an epoch once
        if self._undrawn is None:
            self._undrawn = self.windows()
        return self._draw_all(self._undrawn)

    def _draw_all(self, windows: Iterator[Window]) -> Iterator[object]:
        self._undrawn = None
        for window in windows:
            self.drawn.append(window)
            for micro_batch in window:
                yield micro_batch.indices

    def windows(self) -> Iterator[Window]:
        """Yield the windows from the position on; their batches are not read yet."""
        if self._is_drawn and isinstance(self._order, Sampled):  # by a loader that begins twice, such as to look ahead
            self._order.rewind()
        self._is_drawn = True
        # a sampler is told the epoch here, before a loader starts workers: it may tell the data set, which they copy
        return self._cut(self._order.entries(self._epoch, self._start))

    def _cut(self, entries: Iterator[object]) -> Iterator[Window]:
        share, place, draw = self._share, self._start, self._draw
        seed, size, num_ranks = derive_seed(self._seed, self._epoch), share.global_batch_size, share.data_size
        is_ready = share.micro_batch_size is None
        length, fewest, taken = 0, 0, self._num_taken
        cuts: list[slice] = []
        totals: list[int | None] = []
        while global_batch := list(islice(entries, size)):
            if len(global_batch) != length:  # only for the first and the last: all others are cut in the same way
                length = len(global_batch)
                if self._drop_last and length < size:
                    return
                cuts, totals, fewest = share.cuts(length), [], share.fewest_micro_batches(length)
            if num_ranks > 1 and (is_ready or not totals):  # ready-made batches may differ in size
                totals = share.totals(global_batch)
            micro_batches = [draw(global_batch[cut], place + cut.start, seed) for cut in cuts[taken:]]
            place, taken = place + length, 0
            yield Window.of_all_ranks(micro_batches, totals, fewest, place)

    def _draw(self, entries: list[Any], place: int, seed: int) -> MicroBatch:
        """Return the micro-batch of these entries of the order; `seed` is that of the epoch."""
        if self._share.micro_batch_size is not None:
            indices: object = SeededIndices(entries, seed, place) if self._is_seeded else entries
            return MicroBatch(None, len(entries), place, indices)
        indices = entries[0]  # a ready-made batch is one entry: the places of its samples are counted inside it
        if not isinstance(indices, list):
            return MicroBatch(None, None, place, indices)
        size = len(indices)
        if self._is_seeded:
            indices = SeededIndices(indices, mix_seed(seed, place), 0)
        return MicroBatch(None, size, place, indices)

    @property
    def sampler(self) -> IndexStream:
        """The sampler, for loaders that repeat one and ask for its length."""
        return self

    def __len__(self) -> int:
        size = self.num_batches()
        if size is None:
            raise TypeError("the sampler has no length")
        return size

    def num_batches(self) -> int | None:
        """Return the micro-batches per epoch, on the rank with the most; None if the sampler has no length."""
        size = self._order.size()
        return None if size is None else self.count(size)

    def count(self, num_entries: int) -> int:
        """Return the number of micro-batches into which `num_entries` are cut, on the rank with the most."""
        whole, rest = divmod(num_entries, self._share.global_batch_size)
        count = whole * self._share.num_micro_batches(self._share.global_batch_size)
        return count if self._drop_last else count + self._share.num_micro_batches(rest)

    def source(self, num_indices: int | None, num_streams: int) -> Source:
        """Return what is known about the order of the current iteration."""
        end = self.end
        return Source(
            -1 if num_indices is None else num_indices,
            -1 if end is None else end,
            comes_once=int(self._order.comes_once),
            in_batches=int(self._share.micro_batch_size is None),
            num_streams=num_streams,
        )

    @property
    def is_sequential(self) -> bool:
        """Whether the index at a position is the position."""
        return isinstance(self._order, Sequential)

    @property
    def head(self) -> list[object]:
        """The first indices of the epoch, as far as they were drawn."""
        return self._order.head

    def order_state(self) -> dict[str, object] | None:
        """Return what a resumed run needs to draw the same entries, beside the seed; None if that is enough."""
        return self._order.state_dict() if isinstance(self._order, Sampled) else None

    def load_order_state(self, state: Mapping[str, object] | None, epoch: int, head: list[object]) -> None:
        """Continue from what `order_state` returned in this epoch, of which these were the first indices."""
        if isinstance(self._order, Sampled):
            self._order.load_state_dict(state, epoch, head)

    def place(self) -> Place | None:
        """Return where the user's sampler is, if there is one."""
        return self._order.place() if isinstance(self._order, Sampled) else None

    def go_back(self, place: Place | None) -> None:
        """Forget what was drawn since `place`."""
        if isinstance(self._order, Sampled) and place is not None:
            self._order.go_back(place)

    @property
    def end(self) -> int | None:
        """The position after the last entry that this iteration reads; None if the sampler has no length."""
        size, width = self._order.size(), self._share.global_batch_size
        if size is None or not self._drop_last:
            return size
        return self._start + max(0, size - self._start) // width * width

    def count_before(self, position: int) -> int:
        """Return the number of an epoch's micro-batches before a position."""
        size = self._order.size()
        # counted from the end: the position may lie inside a global batch if their size has changed
        return self.count(position) if size is None else self.count(size) - self.count(max(0, size - position))
