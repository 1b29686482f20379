"""Pieces: what one rank holds of a tensor, the whole or a block of it."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from ...strategies.errors import CheckpointError


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


def own_piece(tensor: Any, path: str) -> Piece | None:
    """Return the block of a DTensor that this rank is to write: None where it has none, or another rank has the same.

    Raises:
        CheckpointError: for one whose ranks hold summands instead of blocks; `path` names it.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise CheckpointError(
            f"{path} is a DTensor with placements {placements}; call its redistribute() before saving."
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None or any(p.is_replicate() and at for p, at in zip(placements, coordinate, strict=True)):
        return None
    local = tensor.detach().to_local()
    if not local.numel() and any(coordinate):
        return None
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    return Piece(local, tuple(offsets))
