"""Reading in this process: the batches of a DataLoader without workers, taken from its data set directly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, IterDataPipe, MapDataPipe

from .loader_kinds import begin_iteration
from .sampled import length_of

_READING: Final = ("__iter__", "_get_iterator", "_auto_collation", "_index_sampler")
"""What a subclass of DataLoader can override to read in another way."""


def reader_of(loader: DataLoader[object]) -> Callable[[Any], object] | None:
    """Return a function that makes a batch from its indices, as the loader does; None to use the loader's iterator.

    The function calls the data set and ``collate_fn`` as the iterator would, but without its 6 us, 4 of which are
    torch's profiler.
    """
    if not _is_read_plainly(loader):
        return None
    dataset: Any = loader.dataset
    collate: Callable[[Any], Any] = loader.collate_fn
    if loader.batch_sampler is None:
        return lambda index: collate(dataset[index])
    many = getattr(dataset, "__getitems__", None)
    if many:
        return lambda indices: collate(many(indices))
    return lambda indices: collate([dataset[index] for index in indices])


def batches_of(loader: DataLoader[object]) -> Iterator[object]:
    """Return an iterator over the batches of an iterable data set, in the same way."""
    # torch compares the length that a data set announces with what it yields
    if not _is_read_plainly(loader) or length_of(loader.dataset) is not None:
        return begin_iteration(loader)
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # as torch does, for workers
    collate: Callable[[Any], object] = loader.collate_fn
    samples = iter(loader.dataset)
    if loader.batch_size is None:
        return map(collate, samples)
    return map(collate, _split_into_chunks(samples, loader.batch_size, drop_last=loader.drop_last))


def _is_read_plainly(loader: DataLoader[Any]) -> bool:
    """Return whether a loader's iterator is torch's own, and does no more than read and collate."""
    if isinstance(loader.dataset, IterDataPipe | MapDataPipe) or loader.num_workers or loader.pin_memory:
        return False
    kind, own = type(loader), vars(loader)
    return all(getattr(kind, name) is getattr(DataLoader, name) and name not in own for name in _READING)


def _split_into_chunks(samples: Iterator[object], size: int, *, drop_last: bool) -> Iterator[list[object]]:
    """Yield lists of `size` samples; the last one may be shorter."""
    while len(chunk := list(islice(samples, size))) == size:
        yield chunk
    if chunk and not drop_last:
        yield chunk
