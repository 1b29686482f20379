"""All-gather for modules: Lightning's shapes, and an error on every rank if sizes differ."""

from __future__ import annotations

import zlib
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...common.errors import RunError
from ...strategies import Strategy
from ...strategies.distributed import tensor_collectives
from ...strategies.distributed.nested import map_tensors, named_leaves
from ...strategies.distributed.tensor_collectives import Wire


def all_gather(data: object, strategy: Strategy, group: ProcessGroup | None, *, sync_grads: bool) -> object:
    """Return the tensors and numbers of all data ranks, stacked in a new first dimension; unchanged on one rank.

    Collective: every rank of the group calls it.

    Args:
        data: tensors and numbers, in lists, tuples, dicts and dataclasses.
        strategy: the strategy of these ranks.
        group: a group of the ranks; None for all data ranks.
        sync_grads: let gradients flow back to the rank that a tensor came from.

    Raises:
        RunError: on every rank, if shapes or names differ between ranks; in a group they are not compared.
    """
    data = map_tensors(Tensor.contiguous, data, lambda leaf: _as_tensor(leaf, strategy.device))
    if strategy.world_size == 1 or (group is None and strategy.data_size == 1):
        return data
    with nullcontext() if sync_grads else torch.no_grad():
        if group is not None:
            return map_tensors(partial(_gather_in_group, group), data)
        _check_shapes(data, strategy)
        return strategy.all_gather(data)


def _gather_in_group(group: ProcessGroup, tensor: Tensor) -> Tensor:
    wire = Wire(group, group.size(), group.rank(), announce=lambda operation, gradient: None)
    return tensor_collectives.all_gather(wire, tensor.reshape(-1)).view(group.size(), *tensor.shape)


def _as_tensor(leaf: object, device: torch.device) -> object:
    return torch.tensor(leaf, device=device) if isinstance(leaf, bool | int | float) else leaf


def _check_shapes(data: object, strategy: Strategy) -> None:
    """Compare a hash of all shapes, and the shapes themselves only if the hashes differ."""
    shapes = {name: tuple(leaf.shape) for name, leaf in named_leaves(data) if isinstance(leaf, Tensor)}
    hashes = strategy.all_gather(torch.tensor(zlib.crc32(repr(shapes).encode())))
    if len(set(hashes.tolist())) == 1:
        return
    of_ranks = strategy.all_gather_object(shapes)
    name, rank = next(
        (name, rank)
        for rank, others in enumerate(of_ranks)
        for name in {**of_ranks[0], **others}
        if of_ranks[0].get(name) != others.get(name)
    )
    raise RunError(
        f"self.all_gather: data{name} must have the same shape on every rank, got {of_ranks[0].get(name)} on rank 0 "
        f"and {of_ranks[rank].get(name)} on rank {rank}; pad it, or use self.trainer.strategy.all_gather_object."
    )
