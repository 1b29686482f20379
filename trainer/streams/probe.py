"""Probe: what ranks and workers get first from an iterable data set, which tells whether it divides itself."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ...strategies.distributed.nested import named_leaves
from ...strategies.launch.signal_handlers import sheltering_forks
from .numbers import Numbers

NUM_PROBED: Final = 8
"""Samples that are compared: as few as a short stream has, as many as different parts need to differ."""
_SILENT: Final = 0
"""The fingerprint of samples that are all the same, which tell nothing."""


class Division(NamedTuple):
    """Over what a stream is still to be dealt."""

    ranks: bool
    workers: bool


def fingerprint_samples(samples: Sequence[object]) -> int:
    """Return a hash of samples; 0 if they are all the same, and 1 if there are none."""
    hashes = [_hash_sample(sample) for sample in samples]
    if not hashes:
        return 1
    if len(set(hashes)) == 1:
        return _SILENT
    return 2 + zlib.crc32(repr(hashes).encode())


def _hash_sample(sample: object) -> int:
    hashed = 0
    for name, leaf in named_leaves(sample):
        if isinstance(leaf, Tensor):
            dense = leaf.detach().cpu().contiguous() if leaf.layout == torch.strided else torch.empty(0)
            content: bytes = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
        elif isinstance(leaf, str | int | float | bytes | None):
            content = repr(leaf).encode()
        else:
            content = _content_bytes(leaf)
        hashed = zlib.crc32(name.encode() + content, hashed)
    return hashed


def _content_bytes(value: Any) -> bytes:
    """Return the content of an array or image; of other objects only the type, which tells nothing."""
    read = getattr(value, "tobytes", None)
    return bytes(read()) if callable(read) else type(value).__name__.encode()


class ProbeDataset(IterableDataset[int]):
    """A stream of one fingerprint: that of the first samples that a worker would read."""

    def __init__(self, dataset: Iterable[object], numbers: Numbers, seed: int) -> None:
        self.dataset, self._numbers, self._seed = dataset, numbers, seed

    def __iter__(self) -> Iterator[int]:
        with self._numbers.stream(self._seed):
            first = list(islice(iter(self.dataset), NUM_PROBED))
        yield fingerprint_samples(first)


def fingerprints_of_workers(
    loader: DataLoader[object], numbers: Numbers, seed: int, begin_worker: Callable[[int], None]
) -> list[int]:
    """Return the fingerprint of what each of a loader's workers reads first; they end again."""
    dataset: Any = loader.dataset
    probe: DataLoader[int] = DataLoader(
        ProbeDataset(dataset, numbers, seed),
        batch_size=None,
        num_workers=loader.num_workers,
        collate_fn=_keep_sample,
        worker_init_fn=begin_worker,
        multiprocessing_context=loader.multiprocessing_context,
        timeout=loader.timeout,
        generator=torch.Generator(),
    )
    with sheltering_forks():
        found = iter(probe)
    return list(found)


def division_of(rows: Sequence[Sequence[int]]) -> Division:
    """Return over what a stream is to be dealt, given the fingerprints of each rank's workers.

    It is dealt only over those that read the same: what differs is divided already, or drawn at random by each.
    """
    readers = {each for row in rows for each in row}
    if _SILENT in readers:
        return Division(ranks=False, workers=False)
    workers_are_equal = all(len(set(row)) == 1 for row in rows)
    ranks_are_equal = len({tuple(row) for row in rows}) == 1
    return Division(ranks=ranks_are_equal and len(rows) > 1, workers=workers_are_equal and len(rows[0]) > 1)


def _keep_sample(sample: object) -> object:
    return sample
