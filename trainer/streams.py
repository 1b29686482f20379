"""A user's training loader, read from any position on, without building it again."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from itertools import islice
from typing import Any, Final, Protocol

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from ..strategies.errors import DataError
from .batches import size_of
from .sampling import IndexStream, Order, Sampled, Sequential, Share, Shuffled, length_of, set_epoch
from .seed import RngStream, capture_rng, derive, isolated_rng, restore_rng, seed_generators

_END: Final = object()
_PLACE: Final = ("position", "rounds", "batch_size")


class Stream(Protocol):
    """One training loader while it is read."""

    position: int
    """How far this epoch has been consumed by all ranks; in samples, or in batches where the loader yields those."""
    rounds: int
    """How often the loader has begun again in this epoch of the run, beside longer ones."""

    def seek(self, epoch: int, position: int) -> None:
        """Let the next iteration begin here."""

    def sized_batches(self) -> Iterator[tuple[Any, int]]:
        """Yield the batches from the position on, each with its number of samples."""

    def num_batches(self) -> int | None:
        """Return this rank's batches of a whole epoch; None if the data does not know."""

    def recut(self, accumulate: int) -> None:
        """Make an optimizer step of so many micro-batches, from the next iteration on."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what the loader needs to go on from it."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""

    def close(self) -> None:
        """Let the loader's workers go."""


class Cut:
    """How the global batch is cut for one loader, as the settings say it."""

    def __init__(self, accumulate: int, global_batch_size: int | None, data_rank: int, data_size: int) -> None:
        self.accumulate = accumulate
        self.global_batch_size = global_batch_size
        self.data_rank, self.data_size = data_rank, data_size

    def share(self, batch_size: int | None) -> Share:
        """Return the share of a loader with this batch size; None: it yields ready-made batches."""
        if self.global_batch_size is not None and batch_size is not None:
            size = self.global_batch_size
        else:
            size = (batch_size or 1) * self.data_size * self.accumulate
        return Share(size, batch_size, self.data_rank, self.data_size)


class MapStream:
    """A DataLoader over a data set with indices: its own copy, with our index stream in place of its sampler."""

    def __init__(self, loader: DataLoader[Any], seed: int, cut: Cut, *, in_order: bool) -> None:
        self._cut, self._seed = cut, seed
        self._samples = loader.batch_size if _collates(loader) else None
        self._share = cut.share(self._samples)
        seeded = not (type(loader.dataset) in _PLAIN and loader.collate_fn is default_collate)
        self._indices = IndexStream(
            order_of(loader, seed, in_order=in_order),
            self._share,
            seed=seed,
            drop_last=bool(loader.drop_last),
            is_seeded=seeded,
        )
        self._loader = _with_indices(loader, self._indices)
        self._rng = RngStream(seed) if seeded and loader.num_workers == 0 else None
        self._epoch, self.position, self.rounds, self.batch_size = 0, 0, 0, 1
        self._is_over = False

    def __repr__(self) -> str:
        return f"{self._loader!r:.80}"

    @property
    def global_batch_size(self) -> int | None:
        """Samples of an optimizer step; None where the loader yields ready-made batches."""
        return self._share.global_batch_size if self._samples is not None else None

    @property
    def accumulate(self) -> int:
        """Micro-batches of an optimizer step on this rank."""
        return self._share.num_micro_batches(self._share.global_batch_size)

    def seek(self, epoch: int, position: int) -> None:
        self._epoch, self.position, self.rounds, self._is_over = epoch, position, 0, False

    def recut(self, accumulate: int) -> None:
        if accumulate != self._cut.accumulate:
            self._cut = Cut(accumulate, None, self._cut.data_rank, self._cut.data_size)
            self._share = self._cut.share(self._samples)
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
        for batch in batches:
            size, advance = self._indices.sizes.popleft()
            self.position += advance
            yield batch, size_of(batch) if size is None else size
        self._is_over = True

    def _drawing(self, batches: Iterator[Any], rng: RngStream, epoch: int) -> Iterator[Any]:
        """Yield the batches while random numbers come from a stream apart, seeded by the place of each batch."""
        position, offset = self.position, 0
        while True:
            with rng:
                seed_generators(derive(self._seed, epoch, position, offset))
                batch = next(batches, _END)
            if batch is _END:
                return
            yield batch
            position, offset = self.position, offset + 1 if position == self.position else 0

    def num_batches(self) -> int | None:
        return self._indices.num_batches()

    def __len__(self) -> int:
        return len(self._indices)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _PLACE}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.position, self.rounds, self.batch_size = (state_dict[name] for name in _PLACE)

    def close(self) -> None:
        vars(self._loader)["_iterator"] = None  # persistent workers end now; found by the garbage collector, after 10 s


class IterableStream:
    """Any other iterable: its position is a number of batches, and it is resumed by its own state if it has one."""

    def __init__(self, loader: Any, seed: int) -> None:
        self._loader = loader
        self._seed = seed
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
            for batch in self._begin():
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
        return batches if rng is None else _drawing_from(rng, batches)

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
        state: dict[str, Any] = {"is_over": self._is_over, **{name: getattr(self, name) for name in _PLACE}}
        if hasattr(self._loader, "state_dict") and hasattr(self._loader, "load_state_dict"):
            state["loader"] = self._loader.state_dict()
            if self._rng is not None:
                with self._rng:
                    state["rng"] = capture_rng()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.position, self.rounds, self.batch_size = (state_dict[name] for name in _PLACE)
        self._state, self._was_over = state_dict, state_dict["is_over"]

    def close(self) -> None:
        """An iterable is the user's to close."""


def _drawing_from(rng: RngStream, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield what an iterator yields while random numbers come from a stream of their own."""
    while True:
        with rng:
            batch = next(batches, _END)
        if batch is _END:
            return
        yield batch


def stream_of(loader: Any, seed: int, cut: Cut, *, in_order: bool = False) -> MapStream | IterableStream:
    """Return the stream that reads a loader; `in_order` ignores a shuffle (overfit_batches).

    Raises:
        DataError: for what is no loader.
    """
    check_loader(loader)
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        return MapStream(loader, seed, cut, in_order=in_order)
    return IterableStream(loader, seed)


def check_loader(loader: Any) -> None:
    """Raise `DataError` unless batches can be read from it, judging without reading."""
    if isinstance(loader, Dataset):
        raise DataError(
            f"{type(loader).__name__} is a data set and yields samples; pass DataLoader(dataset, batch_size=...) "
            "instead."
        )
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise DataError(
            f"{loader!r:.80} is no loader (it is a {type(loader).__name__}); pass a DataLoader or an iterable."
        )


def order_of(loader: DataLoader[Any], seed: int, *, in_order: bool) -> Order:
    """Return the order in which a loader's sampler reads, as a function of (seed, epoch)."""
    dataset: Any = loader.dataset
    if in_order:
        return Sequential(len(dataset))
    if _has_own_batches(loader):
        return Sampled(loader.batch_sampler, seed)  # type: ignore[arg-type]
    sampler: Any = loader.sampler
    if type(sampler) is SequentialSampler:
        return Sequential(len(dataset))
    generator = getattr(sampler, "generator", None)
    if isinstance(generator, torch.Generator):
        sampler = copy.copy(sampler)
        sampler.generator = None  # draws from a stream of its own, begun by the seed, so that it can be resumed
        seed = generator.initial_seed()
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(dataset):
        return Shuffled(len(dataset), seed)
    return Sampled(sampler, seed)


def unshuffled(loader: Any) -> Any:
    """Return a copy of a loader that reads its samples in their order; one that does not shuffle as it is."""
    if not isinstance(loader, DataLoader) or type(loader.sampler) is not RandomSampler:
        return loader
    dataset: Any = loader.dataset
    indices = SequentialSampler(dataset)
    if loader.batch_size is None:
        return _with_indices(loader, indices)
    return _with_indices(loader, BatchSampler(indices, loader.batch_size, loader.drop_last))


_PLAIN: Final = {TensorDataset, list, tuple, range}


def _collates(loader: DataLoader[Any]) -> bool:
    """Whether the loader itself makes batches of samples, of its batch_size."""
    return loader.batch_size is not None


def _has_own_batches(loader: DataLoader[Any]) -> bool:
    """Whether the user gave a batch sampler."""
    return loader.batch_size is None and loader.batch_sampler is not None


def _with_indices(loader: DataLoader[Any], indices: Iterable[Any]) -> DataLoader[Any]:
    """Return a copy of the loader, of the same class and with everything it has, that reads these indices."""
    clone = copy.copy(loader)
    batched = loader.batch_sampler is not None
    # a DataLoader forbids setting its sampler, for fear of a half-changed one: everything that uses it is set here
    vars(clone)["batch_sampler" if batched else "sampler"] = indices
    vars(clone)["_iterator"] = None
    return clone
