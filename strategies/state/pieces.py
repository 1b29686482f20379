"""Pieces: what one rank holds of a tensor, the whole or a block of it."""

from __future__ import annotations

import sys
import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import CheckpointError


class Piece(NamedTuple):
    """A tensor of a file, whole or a shard: its place in the whole tensor, one offset a dimension."""

    tensor: Tensor
    offsets: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> Piece:
        """Return a tensor that is no shard."""
        return cls(tensor, (0,) * tensor.dim())


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, of which this rank holds a shard."""
    if type(tensor) in (Tensor, Parameter):
        return False
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def own_piece(tensor: Any, path: str) -> Piece:
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
        return Piece.whole(torch.empty(tensor.shape, dtype=tensor.dtype))
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    return Piece(tensor.detach().to_local(), tuple(offsets))


def writes(tensor: Any, piece: Piece, key: str) -> bool:
    """Return whether this rank is to write its block of a DTensor: of all that hold the same, one does.

    `key` deals the tensors to the replicas, so that all write about as much.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    replica, num_replicas, is_first_shard = 0, 1, True
    for placement, at, size in zip(tensor.placements, coordinate, tensor.device_mesh.shape, strict=True):
        if placement.is_replicate():
            replica, num_replicas = replica * size + at, num_replicas * size
        else:
            is_first_shard &= at == 0
    if zlib.crc32(key.encode()) % num_replicas != replica:
        return False
    return is_first_shard or piece.tensor.numel() > 0


def replicas_of(tensor: Any) -> list[int]:
    """Return the ranks that hold the same block of a DTensor as this one, itself included."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    at = (slice(None) if place.is_replicate() else c for place, c in zip(tensor.placements, coordinate, strict=True))
    ranks: list[int] = tensor.device_mesh.mesh[tuple(at)].flatten().tolist()
    return ranks


def layout_of(tensor: Any) -> dict[str, int]:
    """Return the axes of a DTensor's mesh, with their degrees of parallelism."""
    mesh = tensor.device_mesh
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
