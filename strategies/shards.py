"""Shards: tensors of which each rank holds a part, out of whole ones and back."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .collectives import Collectives


def is_shard(value: object) -> bool:
    """Return whether a value is a DTensor, of which this rank holds a part."""
    module: Any = sys.modules.get("torch.distributed.tensor")  # without it there is none
    return module is not None and isinstance(value, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor; it shares the tensor's memory."""
    return tensor.to_local() if is_shard(tensor) else tensor  # type: ignore[attr-defined]


def shard_like(value: Any, like: Any) -> Any:
    """Return this rank's part of a whole tensor, cut as `like` is; what does not fit is returned as it is.

    Only the part is read, which matters where the whole lies in a mapped file.
    """
    if not is_shard(like) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    if is_shard(value):
        return value.redistribute(like.device_mesh, like.placements)  # type: ignore[attr-defined]
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    region = tuple(slice(start, start + size) for start, size in zip(offsets, shape, strict=True))
    part = value[region].to(device=like.device, copy=True)
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def gather_whole(state: Mapping[str, Any], *, is_kept: bool) -> dict[str, Any]:
    """Return a state with whole tensors on the CPU; nothing where it is not kept. Collective: every rank calls it.

    One tensor at a time is whole on the ranks that do not keep it.
    """
    found: dict[str, Any] = {}
    for name, value in state.items():
        whole = value.full_tensor() if is_shard(value) else value
        if is_kept:
            found[name] = whole.detach().cpu() if isinstance(whole, Tensor) else whole
    return found


def clip_by_norm(gradients: Iterable[Tensor], limit: float, collectives: Collectives, num_replicas: int) -> None:
    """Scale gradients so that the norm of all, over all ranks, is at most `limit`. Collective: every rank calls it."""
    parts = [local_part(gradient) for gradient in gradients]
    norms = [part.double() for part in torch._foreach_norm(parts)] if parts else []
    device = norms[0].device if norms else None
    square = torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)
    norm = (collectives.all_reduce(square) / num_replicas).sqrt()
    if parts:
        torch._foreach_mul_(parts, (limit / (norm + 1e-6)).clamp(max=1.0).to(device))


def unsharded(module: nn.Module) -> list[str]:
    """Return the names of the parameters that are whole on each rank."""
    return [name for name, parameter in module.named_parameters() if not is_shard(parameter)]
