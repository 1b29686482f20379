"""Kinds of loaders: how a user's loader reads, determined without reading."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from ...common.errors import DataError
from ...strategies.launch.signal_handlers import sheltering_forks
from ...strategies.torch_internals.utils import drop_iterator, end_workers, has_workers
from .index_stream import Addressed, AddressedSampler, DataRanks, Order, Sequential, Shuffled
from .sampled import Sampled, Share, has_own_order, length_of


def check_loader(loader: Any, ranks: DataRanks) -> None:
    """Raise `DataError` unless these ranks can read batches from it, as far as can be told without reading."""
    if isinstance(loader, Dataset) and not _is_web_loader(loader):
        raise DataError(
            f"{type(loader).__name__} is a dataset and yields samples; pass DataLoader(dataset, batch_size=...) "
            "instead."
        )
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise DataError(
            f"{loader!r:.80} is not a loader (it is a {type(loader).__name__}); pass a DataLoader or an iterable"
            f"{', or call it' if callable(loader) else ''}."
        )
    if isinstance(loader, Tensor) and loader.ndim < 3:
        raise DataError(
            f"A tensor of shape {tuple(loader.shape)} is not a loader, and would be read row by row; pass "
            "DataLoader(TensorDataset(tensor), batch_size=...) instead."
        )
    sampler = _distributed_sampler(loader)
    if ranks.data_size == 1 or sampler is None:
        return
    if (sampler.num_replicas, sampler.rank) != (ranks.data_size, ranks.data_rank):
        raise DataError(
            f"The loader's {type(sampler).__name__} must divide the data among {ranks.data_size} data ranks, got "
            f"num_replicas={sampler.num_replicas} and rank={sampler.rank} on data rank {ranks.data_rank}. Build it in "
            "train_dataloader() or a similar hook, with num_replicas=self.trainer.strategy.data_size and "
            "rank=self.trainer.strategy.data_rank; or leave it out: samples are divided among ranks without it."
        )


_of_thread = threading.local()


@contextmanager
def ending_workers() -> Iterator[None]:
    """End, on exit, the worker processes of loaders begun inside; the traceback of an error could keep them alive.

    Workers that outlive an iterator (``persistent_workers=True``) are left to the loader.
    """
    outer, own = getattr(_of_thread, "begun", None), WeakSet[Any]()
    _of_thread.begun = own
    try:
        yield
    finally:
        _of_thread.begun = outer
        for iterator in list(own):
            end_workers(iterator)


def begin_iteration(loader: Iterable[Any]) -> Iterator[object]:
    """Return an iterator over a loader; worker processes that it starts ignore Ctrl-C."""
    is_kept = _restart_iterator(loader)
    try:
        with sheltering_forks():
            iterator = iter(loader)
    except Exception as error:  # of several types, by the reason why something cannot be copied
        if "pickle" in str(error) and isinstance(loader, DataLoader):
            error.add_note(
                f"The {loader.num_workers} workers of the DataLoader of {type(loader.dataset).__name__} get copies of "
                "its data set and collate_fn, which cannot be copied if they are, or hold, a lambda or a class or "
                "function defined inside a function: define those at the top of a module, or set num_workers=0."
            )
        raise
    begun = getattr(_of_thread, "begun", None)
    if begun is not None and has_workers(iterator) and not getattr(loader, "persistent_workers", True):
        begun.add(iterator)
    return _until_kept_ends(iterator) if is_kept else iterator


class _Kept:
    """The batches of a loader, in place of an iterator that a subclass keeps; at its end it begins again."""

    def __init__(self, loader: DataLoader[object]) -> None:
        self._loader = loader
        self._batches: Iterator[object] | None = None

    def restart(self) -> None:
        """Begin again with the next batch."""
        self._batches = None

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        if self._batches is None:
            with sheltering_forks():
                self._batches = DataLoader.__iter__(self._loader)
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = None
            raise


def _restart_iterator(loader: Any) -> bool:
    """Let a loader's own iterator begin again, if its class keeps one; return whether it does."""
    kept = [value for value in vars(loader).values() if isinstance(value, _Kept)] if _keeps_iterator(loader) else []
    for batches in kept:
        batches.restart()
    return bool(kept)


def release_workers(loader: DataLoader[object]) -> None:
    """End workers that outlive an epoch, also those that a subclass keeps."""
    _restart_iterator(loader)
    end_persistent_workers(loader)


def _until_kept_ends(iterator: Iterator[object]) -> Iterator[object]:
    """Yield batches until those of the kept iterator end, which a generator turns into an error."""
    try:
        yield from iterator
    except RuntimeError as error:
        if not isinstance(error.__cause__, StopIteration):
            raise


def _keeps_iterator(loader: Any) -> bool:
    """Return whether a loader is of a class that keeps an iterator of batches across epochs, and reads from that."""
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is DataLoader.__iter__:
        return False
    return any(isinstance(value, _Kept) or _is_of_torch(value) for value in vars(loader).values())


def _is_of_torch(value: object) -> bool:
    return isinstance(value, Iterator) and type(value).__module__ == "torch.utils.data.dataloader"


def entries_of(loader: DataLoader[object]) -> Any:
    """Return the sampler whose entries a loader reads: indices, or batches of them.

    A loader that keeps its iterator repeats a sampler without end: then it is that one.
    """
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while _keeps_iterator(loader) and length_of(sampler) is None and hasattr(sampler, "sampler"):
        sampler = sampler.sampler
    return sampler


def end_persistent_workers(loader: Any) -> None:
    """End the workers that a loader keeps between epochs, so that new ones copy its data set as it is then."""
    if getattr(loader, "persistent_workers", False):
        drop_iterator(loader)


def _is_web_loader(loader: object) -> bool:
    """Return whether a loader is webdataset's: a data set by class, which yields the batches of its DataLoader."""
    return any(kind.__name__ == "WebLoader" for kind in type(loader).__mro__)


def is_indexed(loader: object) -> bool:
    """Return whether a loader reads its samples by index."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def is_sequence(loader: Any) -> bool:
    """Return whether a loader holds batches by index; an object with its own ``__iter__`` is read with that."""
    if isinstance(loader, Sequence):
        return True
    return hasattr(loader, "__getitem__") and length_of(loader) is not None and not hasattr(loader, "__iter__")


def is_dealt(loader: object, ranks: DataRanks) -> bool:
    """Return whether a loader's batches are dealt to the ranks from outside; otherwise it yields each rank its own."""
    if not ranks.is_dealing or not (is_indexed(loader) or is_sequence(loader)):
        return False
    return _distributed_sampler(loader) is None


def _distributed_sampler(loader: Any) -> DistributedSampler[object] | None:
    """Return the user's DistributedSampler, of the loader or of its batch sampler; None if it has none."""
    samplers = getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    return next((sampler for sampler in samplers if isinstance(sampler, DistributedSampler)), None)


def order_of(loader: DataLoader[object], seed: int, *, in_order: bool, share: Share | None = None) -> Order:
    """Return the order in which a loader's sampler reads, as a function of (seed, epoch).

    If the sampler has random generators of its own, and `share` is given, this is collective: every rank calls it.
    """
    dataset: Any = loader.dataset
    if in_order:
        return Sequential(len(dataset))
    entries = entries_of(loader)
    sampler: Any = entries if loader.batch_size is None else loader.sampler
    if isinstance(sampler, AddressedSampler):
        return Addressed(sampler, seed)
    if _has_own_batches(loader):
        return Sampled(entries, seed, share)
    if type(sampler) is SequentialSampler or (_is_random(sampler) and has_own_order(dataset)):
        return Sequential(len(dataset))
    # torchdata's sampler makes its own generator, with a different seed each time
    generator = loader.generator if _is_of_torchdata(sampler) else getattr(sampler, "generator", None)
    if isinstance(generator, torch.Generator):
        seed = generator.initial_seed()
    if _is_random(sampler) and not sampler.replacement and sampler.num_samples == len(dataset):
        return Shuffled(len(dataset), seed)
    return Sampled(sampler, seed, share)


def _is_random(sampler: object) -> bool:
    """Return whether a sampler is that of ``shuffle=True``: torch's, or torchdata's for a StatefulDataLoader."""
    return type(sampler) is RandomSampler or _is_of_torchdata(sampler)


def _is_of_torchdata(sampler: object) -> bool:
    kind = type(sampler)
    return kind.__name__ == "RandomSampler" and kind.__module__.startswith("torchdata.")


def unshuffle_loader(loader: object) -> object:
    """Return a copy of a loader that reads its samples in order; return one that does not shuffle as it is."""
    if not isinstance(loader, DataLoader) or not _is_random(loader.sampler):
        return loader
    dataset: Any = loader.dataset
    indices = SequentialSampler(dataset)
    if loader.batch_size is None:
        return with_indices(loader, indices)
    return with_indices(loader, BatchSampler(indices, loader.batch_size, loader.drop_last))


def makes_batches(loader: DataLoader[object]) -> bool:
    """Return whether the loader itself makes batches of samples, of its batch_size."""
    return loader.batch_size is not None


def _has_own_batches(loader: DataLoader[object]) -> bool:
    """Return whether the user passed a batch sampler."""
    return loader.batch_size is None and loader.batch_sampler is not None


def with_indices(loader: DataLoader[Any], indices: Iterable[object]) -> DataLoader[object]:
    """Return a copy of the loader, with its class and attributes, that reads these indices."""
    clone = copy.copy(loader)
    batched = loader.batch_sampler is not None
    # a DataLoader forbids setting its sampler, which could leave it inconsistent: all that depends on it is set here
    vars(clone)["batch_sampler" if batched else "sampler"] = indices
    drop_iterator(clone)
    if _keeps_iterator(loader):  # it does so to keep its workers; the iterator that it made reads its own sampler
        vars(clone)["persistent_workers"] = loader.num_workers > 0
        kept = [name for name, value in vars(loader).items() if _is_of_torch(value) and name != "_iterator"]
        vars(clone).update({name: _Kept(clone) for name in kept})
    return clone
