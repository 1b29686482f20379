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
from ..torch_internals import read_by_placements, strided_shard
from .lazy_tensor import Block, read_block
from .shards import Holders, cuts_of, pieces_of, shard_size


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


def values_here(tensor: Tensor) -> Tensor:
    """Return the numbers that this rank holds of a tensor; of a sparse one, those of its rows."""
    tensor = local_shard(tensor)
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def gathered(tensor: Tensor) -> Tensor:
    """Return a tensor, with a gradient; a DTensor is gathered. Collective: the ranks of its mesh call it."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


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
    return with_local_shard(like, _read_shard(value, like))


def _read_shard(value: Tensor, like: Any) -> Tensor:
    pieces, shape = pieces_of(like), local_shard(like).shape
    if len(pieces) == 1 and shape.numel():
        return read_block(value, pieces[0].offsets, pieces[0].shape, like.device)
    shard = torch.empty(shape, dtype=value.dtype, device=like.device)
    if not shape.numel():  # fully_shard gives an empty shard an odd shape
        return shard
    for piece in pieces:
        shard[piece.here] = read_block(value, piece.offsets, piece.shape)
    return shard


# --- all shards ------------------------------------------------------------------------------------------------------


def gather_whole(state: Mapping[str, Any], *, is_kept: bool) -> dict[str, Any]:
    """Return a state with whole tensors on the CPU; an empty one where it is not kept. Collective: every rank calls it.

    One tensor at a time is whole on the ranks that do not keep it.
    """
    whole: dict[str, Any] = {}
    for name, value in state.items():
        if is_dtensor(value):
            value = whole_tensor(value)
        if is_kept:
            whole[name] = value.detach().cpu() if isinstance(value, Tensor) else value
    return whole


def whole_on_cpu(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return dense copies of tensors, whole, on the CPU, without those that are None. Collective: ranks of the mesh."""
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor is not None:
            found = whole_tensor(tensor) if is_dtensor(tensor) else tensor
            dense = found.detach().to_dense() if found.is_sparse else found.detach()
            whole[name] = dense.to("cpu", copy=True)
    return whole


def multiply_all(tensors: Sequence[Tensor], factor: Tensor | float) -> None:
    """Multiply tensors in place; a factor takes their dtype, so that torch does not read it from the device."""
    if not isinstance(factor, Tensor):
        if tensors:
            torch._foreach_mul_(list(tensors), factor)
        return
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for (device, dtype), group in groups.items():
        torch._foreach_mul_(group, factor.to(device, dtype))


def whole_tensor(tensor: Any) -> Tensor:
    """Return the whole of a DTensor, of a packed one as well. Collective: the ranks of its mesh call it."""
    from torch.distributed.tensor import Shard

    mesh = tensor.device_mesh
    # a tensor that is offloaded to the CPU goes to the device on which its mesh communicates
    local = local_shard(tensor).to(mesh.device_type)
    if mesh.ndim == 1:
        return _full(local, mesh, tensor.placements[0], tensor.shape)
    shape, steps = list(tensor.shape), []
    for dim in range(tensor.dim()):
        for axis, split_factor in cuts_of(tensor, dim):
            placement = Shard(dim) if split_factor == 1 else strided_shard(dim, split_factor)
            steps.append((mesh[mesh.mesh_dim_names[axis]], placement, torch.Size(shape)))
            shape[dim] = shard_size(shape[dim], mesh.shape[axis], split_factor, mesh.get_coordinate()[axis])
    local = local if local.numel() else local.new_empty(shape)  # fully_shard gives an empty shard an odd shape
    for submesh, placement, whole in reversed(steps):
        local = _full(local, submesh, placement, whole)
    return local


def _full(local: Tensor, mesh: Any, placement: Any, shape: torch.Size) -> Tensor:
    """Return the whole of a tensor that lies on a mesh of one axis. Collective: the ranks of the mesh call it."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    on_mesh: Any = DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=stride)
    read_by_placements(on_mesh)
    full: Tensor = on_mesh.full_tensor()
    return full


def clip_by_norm(
    gradients: Sequence[Tensor],
    limit: float,
    collectives: Collectives,
    holders: Holders,
    copies: Sequence[int] | None = None,
) -> Tensor:
    """Scale gradients so that their norm is at most `limit`, whatever the meshes on which they lie; return the norm.

    A shard counts as 1 / (the number of ranks that hold it) on each of them; `copies` says of each gradient how many
    stages of a pipeline have it. Collective: every rank calls it.
    """
    by_share: dict[float, list[Tensor]] = {}
    for gradient, number_of_copies in zip(gradients, copies or [1] * len(gradients), strict=True):
        number = len(holders.of(gradient)) if is_dtensor(gradient) else collectives.world_size
        by_share.setdefault(1 / (number * number_of_copies), []).append(local_shard(gradient))
    squares = [
        torch.stack([norm.double() for norm in torch._foreach_norm(shards)]).square().sum() * share
        for share, shards in by_share.items()
    ]
    norm = collectives.all_reduce(sum(squares, torch.zeros(()))).sqrt()
    for shards in by_share.values():
        torch._foreach_mul_(shards, (limit / (norm + 1e-6)).clamp(max=1.0).to(shards[0]))
    return norm  # type: ignore[no-any-return]


# --- what a checkpoint holds of them ---------------------------------------------------------------------------------


def own_blocks(tensor: Any, path: str) -> list[Block]:
    """Return the blocks of a DTensor that this rank holds: one, or several of a packed tensor.

    Raises:
        CheckpointError: for one whose ranks hold summands instead of blocks; `path` names it.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(
            f"{path} is a DTensor with placements {tensor.placements}; call its redistribute() before saving."
        )
    shard = local_shard(tensor)
    if not tensor.numel():
        return [Block.whole(torch.empty(tensor.shape, dtype=tensor.dtype))]
    if tensor.device_mesh.get_coordinate() is None:
        return [Block.whole(shard)]
    return [Block(shard[piece.here], piece.offsets) for piece in pieces_of(tensor)]


def writes(tensor: Any, key: str, holders: Holders) -> bool:
    """Return whether this rank is to write its shard of a DTensor: one rank does, of all that hold the same shard.

    `key` deals the tensors to the replicas, so that all write about as much.
    """
    ranks = holders.of(tensor)
    if not ranks or ranks[zlib.crc32(key.encode()) % len(ranks)] != tensor.device_mesh.get_rank():
        return False
    coordinate = zip(tensor.placements, tensor.device_mesh.get_coordinate(), strict=True)
    is_first_shard = all(at == 0 for placement, at in coordinate if not placement.is_replicate())
    return is_first_shard or local_shard(tensor).numel() > 0


def layout_of(tensor: Any) -> dict[str, int]:
    """Return the axes of a DTensor's mesh, with their degrees of parallelism."""
    mesh = tensor.device_mesh
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
