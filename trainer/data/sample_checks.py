"""Checks of the samples that ranks and resumed runs read, made once an epoch, from what is read or known anyway."""

from __future__ import annotations

import re
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, zip_longest
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from ...common.errors import DataError
from ...strategies import Strategy
from ...strategies.distributed.nested import named_leaves
from .micro_batch import Window

T = TypeVar("T")

_SAMPLED: Final = 1 << 16
"""Number of elements of a tensor to compare."""
_COMPARED: Final = 16
"""Number of samples of a data set whose content to compare."""


class Drawn(NamedTuple):
    """What one loader reads in an epoch, as far as it is known."""

    loader: str
    order: Sequence[object] | None
    """The first indices of an order that all ranks share."""
    size: int
    """The samples of the data set; -1 if it has no length."""
    content: str
    """The digest of some samples; empty if unknown."""
    batch: str
    """The digest of the first batch of a stream that this rank reads for itself; empty if it tells nothing."""


def gather_numbers(strategy: Strategy, numbers: list[float]) -> list[list[float]]:
    """Return the numbers of each data rank, in rank order. Collective: every rank calls it.

    Raises:
        DataError: on every rank, if ranks that share one replica differ.
    """
    by_data_rank: dict[int, tuple[int, list[float]]] = {}
    for rank, (data_rank, own) in enumerate(strategy.ranks.gather_numbers(numbers)):
        first, others = by_data_rank.setdefault(data_rank, (rank, own))
        if others != own:
            raise _different_batches_error(first, rank, f"counts {others} and {own} of batches, or of samples")
    return [by_data_rank[data_rank][1] for data_rank in range(strategy.data_size)]


def last_batch_of_any(strategy: Strategy, window: Window) -> object:
    """Return this rank's last batch of a window or, if it has none, that of the first rank with one. Collective."""
    collectives = strategy.ranks.all
    owner = int(collectives.all_reduce(float(collectives.rank if window else collectives.world_size), "min"))
    batch = collectives.broadcast(window[-1].batch if window else None, src=owner)
    return window[-1].batch if window else batch


def compare_first_reads(
    items: Iterator[T],
    strategy: Strategy,
    batch_of: Callable[[T], object],
    drawn: Callable[[], list[Drawn]] | None = None,
    epoch: int = 0,
) -> Iterator[T]:
    """Return the items after comparing what the ranks read for the first one.

    Ranks of a replica must have the same batch and, if `drawn` tells what loaders read in this epoch, all ranks the
    same order. Collective if there are several ranks: every rank calls it.

    Raises:
        DataError: on every rank, if batches or orders differ.
    """
    collectives = strategy.ranks.all
    shares_replica = strategy.ranks.data is not collectives
    if not shares_replica and (drawn is None or collectives.world_size == 1):
        return items
    first = next(items, None)
    digest = "" if not shares_replica else "no batch" if first is None else digest_of(batch_of(first))
    rows = collectives.all_gather_object((strategy.data_rank, digest, drawn() if drawn is not None else []))
    by_data_rank: dict[int, tuple[int, str]] = {}
    for rank, (data_rank, other, _) in enumerate(rows):
        rank_before, before = by_data_rank.setdefault(data_rank, (rank, other))
        if before != other:
            raise _different_batches_error(rank_before, rank, f"{before} and {other}")
    _compare_orders(
        [(rank, row[2]) for rank, row in enumerate(rows) if by_data_rank[row[0]][0] == rank], epoch, strategy.rank
    )
    return items if first is None else chain([first], items)


def _compare_orders(ranks: list[tuple[int, list[Drawn]]], epoch: int, own_rank: int) -> None:
    """Compare what the loaders of all data ranks read; each is given with its rank."""
    (first_rank, mine), *others = ranks
    for rank, theirs in others:
        for one, other in zip(mine, theirs, strict=False):
            if one.order is None or other.order is None:
                continue
            if (one.order, one.size) != (other.order, other.size):
                raise DataError(
                    f"Ranks {first_rank} and {rank} draw different orders from {one.loader} in epoch {epoch}: "
                    f"{describe_difference(one, other)}. All ranks must draw the same, of which each gets its part: "
                    "let the sampler's random numbers depend only on its seed and the epoch, and give all ranks the "
                    "same data."
                )
            if one.content != other.content and own_rank == 0:
                warnings.warn(
                    f"Ranks {first_rank} and {rank} have different samples under the same indices in {one.loader} "
                    f"({one.size} samples): some are trained twice, others never. Build the data set in the same way "
                    "on each rank; sort lists of files.",
                    stacklevel=2,
                )
    if own_rank == 0:
        _warn_of_copies(ranks)


def _warn_of_copies(ranks: list[tuple[int, list[Drawn]]]) -> None:
    """Warn if two data ranks read the same from a stream that each reads for itself."""
    for streams in zip(*(drawn for _, drawn in ranks), strict=False):
        seen: dict[str, int] = {}
        for (rank, _), stream in zip(ranks, streams, strict=True):
            if stream.batch and stream.batch in seen:
                warnings.warn(
                    f"Ranks {seen[stream.batch]} and {rank} got the same first batch from {stream.loader}, which each "
                    "rank reads for itself: if each reads all of it, every sample counts once for each rank. Divide it "
                    "by trainer.strategy.data_rank and data_size; if it is meant to be the same, pass "
                    "use_distributed_sampler=False.",
                    stacklevel=2,
                )
                break
            seen[stream.batch] = rank


def describe_difference(one: Drawn, other: Drawn) -> str:
    """Return where two orders differ, as text."""
    if one.size != other.size:
        return f"of {one.size} and of {other.size} samples"
    pairs = zip_longest(one.order or (), other.order or (), fillvalue="none")
    place, here, there = next((place, *pair) for place, pair in enumerate(pairs) if pair[0] != pair[1])
    return f"at position {place} the indices {here} and {there}"


def copies_of_workers(digests: Sequence[str]) -> bool:
    """Return whether the first batch of each of several workers is the same, and tells something."""
    return len(digests) > 1 and bool(digests[0]) and len(set(digests)) == 1


def telling_digest(batch: object) -> str:
    """Return the digest of a batch; nothing for one whose elements are all the same."""
    tensors = [leaf for _, leaf in named_leaves(batch) if isinstance(leaf, Tensor) and leaf.layout == torch.strided]
    varies = any(leaf.numel() > 1 and bool((leaf != leaf.flatten()[0]).any()) for leaf in tensors)
    return digest_of(batch) if varies else ""


def content_of(dataset: Any) -> str:
    """Return a digest of some samples of a data set, as far as they are known without reading it; else nothing.

    Known are the samples of tensors and lists, and those attributes with an item for each sample that hold file names,
    arrays or tensors. Of the path of a file only its name counts.
    """
    try:
        size = len(dataset)
    except (TypeError, NotImplementedError):
        return ""
    places = sorted({place * max(size - 1, 0) // (_COMPARED - 1) for place in range(_COMPARED)}) if size else []
    rows = [row for column in _columns_as_text(dataset, places, size) for row in column]
    return f"{zlib.crc32(repr(rows).encode()):08x}" if rows else ""


def _columns_as_text(dataset: Any, places: Sequence[int], size: int) -> list[list[str]]:
    if type(dataset) is Subset:
        inner: Any = dataset.dataset
        return _columns_as_text(inner, [int(dataset.indices[place]) for place in places], len(inner))
    if type(dataset) is TensorDataset:
        return [
            [_summarize_value(tensor[place]) for place in places]
            for tensor in dataset.tensors
            if tensor.device.type == "cpu"
        ]
    holders = [dataset] if type(dataset) in (list, tuple) else list(getattr(dataset, "__dict__", {}).values())
    return [
        [_summarize_value(holder[place]) for place in places]
        for holder in holders
        if (type(holder) in (list, tuple) or _is_array(holder)) and _is_sized(holder, size) and _is_data(holder)
    ]


def _is_array(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    if isinstance(value, Tensor):
        return value.device.type == "cpu"
    return numpy is not None and type(value) is numpy.ndarray


def _is_sized(value: Any, size: int) -> bool:
    return size > 0 and (not _is_array(value) or value.ndim > 0) and len(value) == size


def _is_data(value: Any) -> bool:
    """Return whether a value holds samples: a list of numbers may as well be a note of what was read."""
    return _is_array(value) or not isinstance(value[0], int | float)


def _summarize_value(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {zlib.crc32(_sample_bytes(value)):08x}"
    if _is_array(value):
        return f"{list(value.shape)} {zlib.crc32(value.tobytes()) if value.dtype != object else 0:08x}"
    if isinstance(value, str):
        return re.split(r"[/\\]", value)[-1]
    if isinstance(value, list | tuple):
        return " ".join(_summarize_value(item) for item in value[:_COMPARED])
    return repr(value) if isinstance(value, int | float | bytes | None) else type(value).__name__


def _different_batches_error(first: int, other: int, found: str) -> DataError:
    return DataError(
        f"Ranks {first} and {other} hold parts of one replica, whose loaders must give both the same batches, got "
        f"{found}. Divide samples by trainer.strategy.data_rank and data_size (trainer.distributed_sampler_kwargs), "
        "not by rank and world_size, and make random choices depend only on the seed."
    )


def digest_of(batch: object) -> str:
    """Return the shapes of a batch, and a hash of its contents."""
    shapes, hashed = [], 0
    for name, leaf in named_leaves(batch):
        if not isinstance(leaf, Tensor):
            hashed = zlib.crc32(f"{name} {leaf!r}".encode() if isinstance(leaf, str | int | float) else b"", hashed)
            continue
        shapes.append(f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}")
        hashed = zlib.crc32(_sample_bytes(leaf), hashed)
    return f"{', '.join(shapes) or type(batch).__name__} with hash {hashed:08x}"


def _sample_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of elements spread over a dense tensor; nothing for other tensors."""
    if tensor.layout != torch.strided or not tensor.numel():
        return b""
    flat = tensor.detach().reshape(-1)
    flat = flat[:: -(-len(flat) // _SAMPLED)].cpu().clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().tobytes()
