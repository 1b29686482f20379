"""Shards: tensors of which each rank holds a part, out of whole ones and back."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..distributed.collectives import Collectives
from .lazy_tensor import read_block


def is_shard(value: object) -> bool:
    """Return whether a value is a DTensor, of which this rank holds a part."""
    module: Any = sys.modules.get("torch.distributed.tensor")  # without it there is none
    return module is not None and isinstance(value, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor; it shares the tensor's memory."""
    return tensor.detach().to_local() if is_shard(tensor) else tensor  # type: ignore[attr-defined]


def with_part(like: Any, part: Tensor) -> Tensor:
    """Return a tensor cut as `like` is, of which this rank holds `part`."""
    if not is_shard(like):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def shard_like(value: Any, like: Any) -> Any:
    """Return this rank's part of a whole tensor, cut as `like` is; what does not fit is returned as it is.

    Only the part is read, which matters where the whole lies in a mapped file.
    """
    if not is_shard(like) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    if is_shard(value):
        return value.redistribute(like.device_mesh, like.placements)  # type: ignore[attr-defined]
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    part = read_block(value, offsets, shape, like.device)
    return with_part(like, part)


def gather_whole(state: Mapping[str, Any], *, is_kept: bool) -> dict[str, Any]:
    """Return a state with whole tensors on the CPU; nothing where it is not kept. Collective: every rank calls it.

    One tensor at a time is whole on the ranks that do not keep it.
    """
    found: dict[str, Any] = {}
    for name, value in state.items():
        if is_shard(value):  # one that is offloaded goes to where its mesh communicates
            on_mesh: Any = with_part(value, local_part(value).to(value.device_mesh.device_type))
            value = on_mesh.full_tensor()
        if is_kept:
            found[name] = value.detach().cpu() if isinstance(value, Tensor) else value
    return found


def clip_by_norm(parts: Sequence[Tensor], limit: float, collectives: Collectives, num_replicas: int) -> None:
    """Scale gradients, of which these are this rank's parts, so that the norm of all over all ranks is at most `limit`.

    Collective: every rank calls it.
    """
    norms = torch._foreach_norm(list(parts)) if parts else (torch.zeros(()),)
    square = torch.stack([norm.double() for norm in norms]).square().sum()
    norm = (collectives.all_reduce(square) / num_replicas).sqrt()
    if parts:
        torch._foreach_mul_(list(parts), (limit / (norm + 1e-6)).clamp(max=1.0).to(parts[0].dtype))
