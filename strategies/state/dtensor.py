"""Conversions between whole tensors and DTensors, and what a rank holds and writes of them."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..distributed.collectives import Collectives
from ..errors import CheckpointError
from .lazy_tensor import Block, read_block


def is_dtensor(value: object) -> bool:
    """Return whether a value is a DTensor, of which this rank holds a shard."""
    if type(value) in (Tensor, Parameter):  # nearly all are, and an isinstance with DTensor takes longer
        return False
    module: Any = sys.modules.get("torch.distributed.tensor")  # without it no DTensor exists
    return module is not None and isinstance(value, module.DTensor)


# --- the local shard -------------------------------------------------------------------------------------------------


def local_shard(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, all of it for a plain one; it shares the tensor's memory."""
    return tensor.detach().to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def with_local_shard(like: Any, local: Tensor) -> Tensor:
    """Return a tensor that is sharded as `like` is, of which this rank holds `local`."""
    if not is_dtensor(like):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def shard_like(value: Any, like: Any) -> Any:
    """Return this rank's shard of a whole tensor, sharded as `like` is; a value of another shape is returned as it is.

    Only the shard is read, which matters where the whole tensor lies in a mapped file.
    """
    if not is_dtensor(like) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    if is_dtensor(value):
        return value.redistribute(like.device_mesh, like.placements)  # type: ignore[attr-defined]
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return with_local_shard(like, read_block(value, offsets, shape, like.device))


# --- all shards ------------------------------------------------------------------------------------------------------


def gather_whole(state: Mapping[str, Any], *, is_kept: bool) -> dict[str, Any]:
    """Return a state with whole tensors on the CPU; an empty one where it is not kept. Collective: every rank calls it.

    One tensor at a time is whole on the ranks that do not keep it.
    """
    whole: dict[str, Any] = {}
    for name, value in state.items():
        if is_dtensor(value):
            # a tensor that is offloaded to the CPU goes to the device on which its mesh communicates
            on_mesh: Any = with_local_shard(value, local_shard(value).to(value.device_mesh.device_type))
            value = on_mesh.full_tensor()
        if is_kept:
            whole[name] = value.detach().cpu() if isinstance(value, Tensor) else value
    return whole


def clip_by_norm(shards: Sequence[Tensor], limit: float, collectives: Collectives, num_replicas: int) -> None:
    """Scale gradients, given by this rank's shards, so that their norm over all ranks is at most `limit`.

    Collective: every rank calls it.
    """
    norms = torch._foreach_norm(list(shards)) if shards else (torch.zeros(()),)
    square = torch.stack([norm.double() for norm in norms]).square().sum()
    norm = (collectives.all_reduce(square) / num_replicas).sqrt()
    if shards:
        torch._foreach_mul_(list(shards), (limit / (norm + 1e-6)).clamp(max=1.0).to(shards[0].dtype))


# --- what a checkpoint holds of them ---------------------------------------------------------------------------------


def own_block(tensor: Any, path: str) -> Block:
    """Return the block of a DTensor that this rank holds.

    Raises:
        CheckpointError: for one whose ranks hold summands instead of blocks; `path` names it.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise CheckpointError(
            f"{path} is a DTensor with placements {placements}; call its redistribute() before saving."
        )
    if not tensor.numel():
        return Block.whole(torch.empty(tensor.shape, dtype=tensor.dtype))
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    return Block(local_shard(tensor), tuple(offsets))


def writes(tensor: Any, block: Block, key: str) -> bool:
    """Return whether this rank is to write its block of a DTensor: one rank does, of all that hold the same block.

    `key` deals the tensors to the replicas, so that all write about as much.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    replica, num_replicas, is_first_shard = 0, 1, True
    for placement, index, size in zip(tensor.placements, coordinate, tensor.device_mesh.shape, strict=True):
        if placement.is_replicate():
            replica, num_replicas = replica * size + index, num_replicas * size
        else:
            is_first_shard &= index == 0
    if zlib.crc32(key.encode()) % num_replicas != replica:
        return False
    return is_first_shard or block.tensor.numel() > 0


def replicas_of(tensor: Any) -> list[int]:
    """Return the ranks that hold the same block of a DTensor as this one, itself included."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    along = zip(tensor.placements, coordinate, strict=True)
    index = tuple(slice(None) if placement.is_replicate() else at for placement, at in along)
    ranks: list[int] = tensor.device_mesh.mesh[index].flatten().tolist()
    return ranks


def layout_of(tensor: Any) -> dict[str, int]:
    """Return the axes of a DTensor's mesh, with their degrees of parallelism."""
    mesh = tensor.device_mesh
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
