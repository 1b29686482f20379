"""Values of all ranks that a loop reports: weighted by samples, summed, or concatenated."""

from __future__ import annotations

import torch
from torch import Tensor

from ...common.errors import ConfigError
from ...strategies import Strategy
from ...strategies.distributed.collectives import Collectives
from ...strategies.distributed.nested import iterate_tensors, map_tensors
from ..module.loss import Loss, avoid_zero


def mean_by_samples(data: object, size: int, collectives: Collectives) -> object:
    """Return the mean over ranks, weighted by their samples, or for a `Loss` by its count. Collective."""
    if isinstance(data, Loss):
        own = [data.total.detach() * (size > 0), data.count * (size > 0)]
        total, count = collectives.all_reduce(own)
        return total / avoid_zero(count)
    if collectives.world_size == 1:
        return map_tensors(Tensor.detach, data)
    weighed = map_tensors(
        lambda tensor: _to_floating(tensor.detach()) * size, data, lambda leaf: _multiply_number(leaf, size)
    )
    sums, total_size = collectives.all_reduce([weighed, size])
    return map_tensors(lambda tensor: tensor / total_size, sums, lambda leaf: _multiply_number(leaf, 1 / total_size))


def total_of(data: object, size: int, collectives: Collectives) -> object:
    """Return the sum over ranks, without those that have a stand-in batch. Collective."""
    if isinstance(data, Loss):
        raise ConfigError(
            f"reduce(..., 'sum') must get numbers and tensors, got {data!r:.80}; pass its total, or its count."
        )
    counts = int(size > 0)
    return collectives.all_reduce(
        map_tensors(lambda tensor: tensor.detach() * counts, data, lambda leaf: _multiply_number(leaf, counts))
    )


def concatenate_ranks(data: object, size: int, strategy: Strategy) -> object:
    """Return tensors of all ranks, concatenated along the first dimension, without stand-in batches. Collective."""
    scalar = next((tensor for tensor in iterate_tensors(data) if not tensor.dim()), None)
    if scalar is not None:
        raise ConfigError(
            f"gather_for_metrics must get tensors with a row for each sample, got {scalar!r:.80}; use reduce for it."
        )
    if strategy.data_size == 1:
        return map_tensors(Tensor.detach, data)
    own = [tensor.detach() for tensor in iterate_tensors(data)]
    rows = strategy.ranks.data.all_gather_object(own if size else None)
    columns = zip(*(row for row in rows if row is not None), strict=True)
    joined = iter([torch.cat([part.to(strategy.device) for part in column]) for column in columns])
    return map_tensors(lambda _: next(joined), data)


def _to_floating(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.double()


def _multiply_number(leaf: object, factor: float) -> object:
    return leaf * factor if isinstance(leaf, int | float) and not isinstance(leaf, bool) else leaf
