"""Batches of ranks that share one replica: they must be equal, which is checked where it costs nothing."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from ...strategies import Strategy
from ...strategies.distributed.nested import named_leaves
from ...strategies.errors import DataError

T = TypeVar("T")

_SAMPLED: Final = 1 << 16
"""Number of elements of a tensor to compare."""


def gather_numbers(strategy: Strategy, numbers: list[float]) -> list[list[float]]:
    """Return the numbers of each data rank, in rank order. Collective: every rank calls it.

    Raises:
        DataError: on every rank, if ranks that share one replica differ.
    """
    if strategy.collectives.is_rehearsed:
        return [numbers] * strategy.data_size
    own = torch.tensor([strategy.data_rank, *numbers], dtype=torch.float64)
    rows = strategy.collectives.all_gather(own).tolist()
    by_data_rank: dict[float, tuple[int, list[float]]] = {}
    for rank, row in enumerate(rows):
        first, others = by_data_rank.setdefault(row[0], (rank, row[1:]))
        if others != row[1:]:
            raise _different(first, rank, f"counts {others} and {row[1:]} of batches, or of samples")
    return [by_data_rank[data_rank][1] for data_rank in range(strategy.data_size)]


def compared(items: Iterator[T], strategy: Strategy, batch_of: Callable[[T], Any]) -> Iterator[T]:
    """Return the items after checking that the first batch is the same on all ranks of a replica.

    Collective if several ranks share one: every rank calls it.

    Raises:
        DataError: on every rank, if the batches differ.
    """
    if strategy.data_collectives is strategy.collectives:
        return items
    first = next(items, None)
    digest = "no batch" if first is None else _digest(batch_of(first))
    by_data_rank: dict[int, tuple[int, str]] = {}
    for rank, (data_rank, other) in enumerate(strategy.collectives.all_gather_object((strategy.data_rank, digest))):
        rank_before, before = by_data_rank.setdefault(data_rank, (rank, other))
        if before != other:
            raise _different(rank_before, rank, f"{before} and {other}")
    return items if first is None else chain([first], items)


def _different(first: int, other: int, found: str) -> DataError:
    return DataError(
        f"Ranks {first} and {other} hold parts of one replica, whose loaders must give both the same batches, got "
        f"{found}. Divide samples by trainer.strategy.data_rank and data_size (trainer.distributed_sampler_kwargs), "
        "not by rank and world_size, and make random choices depend only on the seed."
    )


def _digest(batch: Any) -> str:
    """Return the shapes of a batch, and a hash of its contents."""
    shapes, hashed = [], 0
    for name, leaf in named_leaves(batch):
        if not isinstance(leaf, Tensor):
            hashed = zlib.crc32(f"{name} {leaf!r}".encode() if isinstance(leaf, str | int | float) else b"", hashed)
            continue
        shapes.append(f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}")
        hashed = zlib.crc32(_sample(leaf), hashed)
    return f"{', '.join(shapes) or type(batch).__name__} with hash {hashed:08x}"


def _sample(tensor: Tensor) -> bytes:
    """Return the bytes of elements spread over a dense tensor; nothing for other tensors."""
    if tensor.layout != torch.strided or not tensor.numel():
        return b""
    flat = tensor.detach().reshape(-1)
    flat = flat[:: -(-len(flat) // _SAMPLED)].cpu().contiguous()
    return flat.view(torch.uint8).numpy().tobytes()
