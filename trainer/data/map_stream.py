"""A user's training loader, read from any position on, without building it again."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from itertools import chain, islice
from typing import Any, Final, Protocol

import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

from ...callbacks.samples.file import Source
from .index_stream import IndexStream, Ranks, Share, length_of, set_epoch
from .loader_kinds import check_loader, is_dealt, is_indexed, is_sequence, makes_batches, order_of, with_indices
from .sample_trace import FollowedIndices, LoaderTrail
from .seed import RngStream, capture_rng, derive, isolated_rng, restore_rng, seed_generators
from .transfer import size_of

_END: Final = object()
_PLAIN: Final = {TensorDataset, list, tuple, range}
"""Data sets that draw no random numbers."""
_PLACE: Final = ("position", "rounds", "batch_size", "num_streams")


class Stream(Protocol):
    """One training loader while it is read."""

    position: int
    """How far this epoch has been consumed by all ranks; in samples, or in batches where the loader yields those."""
    rounds: int
    """How often the loader has begun again in this epoch of the run, beside longer ones."""
    num_streams: int
    """1 if all ranks share what is read; their number, if each reads its own."""

    def seek(self, epoch: int, position: int) -> None:
        """Let the next iteration begin here."""

    def sized_batches(self) -> Iterator[tuple[Any, int]]:
        """Yield the batches from the position on, each with its number of samples."""

    def num_batches(self) -> int | None:
        """Return the batches of a whole epoch; None if the data does not know."""

    def batches_done(self) -> int:
        """Return how many batches lie before the position, on the rank that has most."""

    def recut(self, accumulate: int) -> None:
        """Make an optimizer step of so many micro-batches, from the next iteration on."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what the loader needs to go on from it."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""

    def is_cut_as(self, state_dict: Mapping[str, Any]) -> bool:
        """Return whether what is read was cut and dealt in the same way when `state_dict` was taken."""

    def source(self) -> Source:
        """Return what is known of the order that is read, if it leaves a trail."""

    def close(self) -> None:
        """Let the loader's workers go."""


class Cut:
    """How the global batch is cut for one loader, as the settings say it."""

    def __init__(self, accumulate: int, global_batch_size: int | None, ranks: Ranks) -> None:
        self.accumulate = accumulate
        self.global_batch_size = global_batch_size
        self.ranks = ranks
        self._num_planned = (ranks.planned_size or ranks.data_size) * accumulate

    @property
    def per_step(self) -> int:
        """Batches of an optimizer step on one rank, where a loader's batches are taken as they come."""
        return math.ceil(self._num_planned / self.ranks.data_size)

    def share(self, batch_size: int | None, *, is_dealt: bool) -> Share:
        """Return the share of a loader with this batch size; None: it yields ready-made batches.

        A loader that is not dealt is all this rank's: its global batch is this rank's part of the whole one.
        """
        if self.global_batch_size is not None and batch_size is not None:
            size = self.global_batch_size
        else:
            size = (batch_size or 1) * self._num_planned
        ranks = self.ranks
        if is_dealt:
            return Share(size, batch_size, ranks.data_rank, ranks.data_size)
        return Share(math.ceil(size / ranks.data_size), batch_size)


class MapStream:
    """A DataLoader over a data set with indices: its own copy, with our index stream in place of its sampler."""

    def __init__(
        self, loader: DataLoader[Any], seed: int, cut: Cut, *, in_order: bool, trail: LoaderTrail | None = None
    ) -> None:
        ranks = cut.ranks
        self.num_streams = 1 if in_order or is_dealt(loader, ranks) else ranks.data_size
        # where each reads its own, the same place is another sample on each rank
        self._seed = seed if self.num_streams == 1 else derive(seed, ranks.data_rank)
        self._cut = cut
        self._samples = loader.batch_size if makes_batches(loader) else None
        self._share = cut.share(self._samples, is_dealt=self.num_streams == 1)
        seeded = not (type(loader.dataset) in _PLAIN and loader.collate_fn is default_collate)
        self._trail = trail
        self._indices = (IndexStream if trail is None else FollowedIndices)(
            order_of(loader, seed, in_order=in_order),
            self._share,
            seed=self._seed,
            drop_last=bool(loader.drop_last),
            is_seeded=seeded,
        )
        self._loader = with_indices(loader, self._indices)
        # a position says what was read only if batches come as the sampler gave them (DataLoader(in_order=False))
        vars(self._loader)["in_order"] = True
        self._rng = RngStream(seed) if seeded and loader.num_workers == 0 else None
        self._epoch, self.position, self.rounds, self.batch_size = 0, 0, 0, 1
        self._is_over = False

    def __repr__(self) -> str:
        return f"{self._loader!r:.80}"

    @property
    def global_batch_size(self) -> int | None:
        """Samples of an optimizer step; None where the loader yields ready-made batches."""
        return self._share.global_batch_size * self.num_streams if self._samples is not None else None

    @property
    def per_step(self) -> int:
        """Micro-batches of an optimizer step, on the rank that has most."""
        return self._share.num_micro_batches(self._share.global_batch_size)

    def seek(self, epoch: int, position: int) -> None:
        self._epoch, self.position, self.rounds, self._is_over = epoch, position, 0, False

    def recut(self, accumulate: int) -> None:
        if accumulate != self._cut.accumulate:
            self._cut = Cut(accumulate, None, self._cut.ranks)
            self._share = self._cut.share(self._samples, is_dealt=self.num_streams == 1)
            self._indices.recut(self._share)

    def __iter__(self) -> Iterator[Any]:
        return (batch for batch, self.batch_size in self.sized_batches())

    def sized_batches(self) -> Iterator[tuple[Any, int]]:
        if self._is_over:  # the next iteration is another epoch
            self.position, self.rounds, self._is_over = 0, self.rounds + 1, False
        epoch = self._epoch + self.rounds
        self._indices.seek(epoch, self.position)
        set_epoch(self._loader.dataset, epoch)
        with isolated_rng():  # an iterator draws a seed for its workers
            torch.default_generator.manual_seed(derive(self._seed, epoch))
            batches: Iterator[Any] = iter(self._loader)
        if self._rng is not None:
            batches = self._drawing(batches, self._rng, epoch)
        if self._trail is not None:
            assert isinstance(self._indices, FollowedIndices)
            batches = self._trail.noting(batches, self._indices, self.rounds)
        for batch in batches:
            size, advance = self._indices.sizes.popleft()
            self.position += advance
            yield batch, size_of(batch) if size is None else size
        self._is_over = True

    def parts(
        self, batches: Iterator[tuple[Any, int]], limit: float
    ) -> Iterator[tuple[list[tuple[Any, int]], list[int | None]]]:
        """Yield this rank's part of each global batch, perhaps empty, and the samples of all ranks.

        Those are of the first, second, ... micro-batches of all ranks together; None where only reading tells.
        `batches` are its `sized_batches`, and `limit` is the largest number of them that a rank may read.
        """
        plans = self._indices.parts
        plans.clear()
        ahead: list[tuple[Any, int]] = []
        while limit > 0:
            if not plans:
                ahead = list(islice(batches, 1))  # makes the sampler go on, which says what comes
            if not plans:
                return
            plan = plans.popleft()
            longest = int(min(limit, len(plan.totals)))
            mine = list(islice(chain(ahead, batches), min(plan.num_micro_batches, longest)))
            ahead = [] if mine else ahead
            self.position = plan.end  # also where this rank has no part
            yield mine, plan.totals[:longest]
            limit -= longest

    def _drawing(self, batches: Iterator[Any], rng: RngStream, epoch: int) -> Iterator[Any]:
        """Yield the batches while random numbers come from a stream apart, seeded by the place of each batch."""
        position, offset = self.position, 0
        first = self._share.data_rank * self.per_step
        while True:
            with rng:
                seed_generators(derive(self._seed, epoch, position, first + offset))
                batch = next(batches, _END)
            if batch is _END:
                return
            yield batch
            position, offset = self.position, offset + 1 if position == self.position else 0

    def num_batches(self) -> int | None:
        return self._indices.num_batches()

    def batches_done(self) -> int:
        return self._indices.count_before(self.position)

    def __len__(self) -> int:
        return len(self._indices)

    def state_dict(self) -> dict[str, Any]:
        return {"cut": self._cut_as, **{name: getattr(self, name) for name in _PLACE}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.position, self.rounds, self.batch_size = _place_in(state_dict, self)

    @property
    def _cut_as(self) -> list[int | None]:
        return [self._cut.ranks.data_size, self._share.global_batch_size, self._samples]

    def is_cut_as(self, state_dict: Mapping[str, Any]) -> bool:
        return list(state_dict.get("cut", ())) == self._cut_as

    def source(self) -> Source:
        assert isinstance(self._indices, FollowedIndices)
        return self._indices.source(length_of(self._loader.dataset), self.num_streams)

    def close(self) -> None:
        vars(self._loader)["_iterator"] = None  # persistent workers end now; found by the garbage collector, after 10 s


class IterableStream:
    """Any other iterable: its position is a number of batches, and it is resumed by its own state if it has one.

    Each rank reads its own. All have the same random numbers, so that what deals a shuffled order to them can.
    """

    def __init__(self, loader: Any, seed: int, num_streams: int, trail: LoaderTrail | None = None) -> None:
        self._loader, self._trail = loader, trail
        self._seed = seed
        self.num_streams = num_streams
        self._owns_rng = isinstance(loader, DataLoader)
        self._rng: RngStream | None = None
        self._epoch, self.position, self.rounds, self.batch_size = 0, 0, 0, 1
        self._is_over = self._was_over = False
        self._state: Mapping[str, Any] = {}

    def __repr__(self) -> str:
        return f"{self._loader!r:.80}"

    def seek(self, epoch: int, position: int) -> None:
        self._epoch, self.position, self.rounds = epoch, position, 0
        self._is_over = self._was_over = False

    def recut(self, accumulate: int) -> None:
        """An iterable is not cut: micro-batches are taken as they come."""

    def __iter__(self) -> Iterator[Any]:
        return (batch for batch, self.batch_size in self.sized_batches())

    def sized_batches(self) -> Iterator[tuple[Any, int]]:
        if self._is_over:  # the next iteration is another epoch
            self.position, self.rounds, self._is_over = 0, self.rounds + 1, False
        if not self._was_over:
            batches = self._begin()
            if self._trail is not None:
                batches = self._trail.counting(batches, self.position, self.rounds)
            for batch in batches:
                self.position += 1
                yield batch, size_of(batch)
        self._is_over, self._was_over = True, False

    def _begin(self) -> Iterator[Any]:
        """Return the batches from the position on."""
        epoch = self._epoch + self.rounds
        for data in (self._loader, getattr(self._loader, "dataset", None)):
            set_epoch(data, epoch)
        state, self._state = self._state, {}
        rng = self._rng = RngStream(derive(self._seed, epoch)) if self._owns_rng else None
        # what a resumed run does to come to its place is none of the random numbers that were restored
        with rng or (isolated_rng() if self.position else nullcontext()):
            if "loader" in state:
                self._loader.load_state_dict(state["loader"])
            batches = iter(self._loader)
            if "loader" not in state and self.position:
                self._skip(batches)
            if "rng" in state and self.position:
                restore_rng(state["rng"])
        return batches if rng is None else drawing_from(rng, batches)

    def _skip(self, batches: Iterator[Any]) -> None:
        warnings.warn(
            f"{type(self._loader).__name__} cannot go to a position: its first {self.position} batches are read again "
            "and dropped, which is exact only if it yields the same each time. Give it state_dict and "
            "load_state_dict, or use torchdata's StatefulDataLoader, to resume at once.",
            stacklevel=2,
        )
        for _ in islice(batches, self.position):
            pass

    def num_batches(self) -> int | None:
        return length_of(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {name: getattr(self, name) for name in _PLACE}
        state["is_over"] = self._is_over
        if hasattr(self._loader, "state_dict") and hasattr(self._loader, "load_state_dict"):
            state["loader"] = self._loader.state_dict()
            if self._rng is not None:
                with self._rng:
                    state["rng"] = capture_rng()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.position, self.rounds, self.batch_size = _place_in(state_dict, self)
        if self.is_cut_as(state_dict):
            self._state, self._was_over = state_dict, state_dict["is_over"]

    def is_cut_as(self, state_dict: Mapping[str, Any]) -> bool:
        return state_dict["num_streams"] == self.num_streams and "is_over" in state_dict

    def batches_done(self) -> int:
        return self.position

    def source(self) -> Source:
        return Source(num_streams=self.num_streams)

    def close(self) -> None:
        """An iterable is the user's to close."""


def _place_in(state_dict: Mapping[str, Any], stream: Stream) -> tuple[int, int, int]:
    """Return position, rounds and batch size out of a state; as near as can be, if other ranks read other streams."""
    position, rounds, batch_size, saved = (state_dict[name] for name in _PLACE)
    if saved != stream.num_streams:
        position = position * saved // stream.num_streams
        warnings.warn(
            f"{stream!r} yields to each rank batches of its own. It was saved by {saved} ranks, {stream.num_streams} "
            f"go on, each from position {position}: some samples of this epoch may come twice or never. Use a data "
            "set with indices, and no DistributedSampler, to resume exactly on any number of ranks.",
            stacklevel=2,
        )
    return position, rounds, batch_size


def drawing_from(rng: RngStream, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield what an iterator yields while random numbers come from a stream of their own."""
    while True:
        with rng:
            batch = next(batches, _END)
        if batch is _END:
            return
        yield batch


def stream_of(
    loader: Any, seed: int, cut: Cut, *, in_order: bool = False, trail: LoaderTrail | None = None
) -> MapStream | IterableStream:
    """Return the stream that reads a loader; `in_order` ignores a shuffle (overfit_batches).

    Raises:
        DataError: for what is no loader.
    """
    check_loader(loader, cut.ranks)
    if cut.ranks.data_size > 1 and cut.ranks.is_dealing and is_sequence(loader):
        loader = DataLoader(loader, batch_size=None, collate_fn=_as_it_is)
    if is_indexed(loader):
        return MapStream(loader, seed, cut, in_order=in_order, trail=trail)
    return IterableStream(loader, seed, cut.ranks.data_size, trail)


def _as_it_is(batch: Any) -> Any:
    return batch
