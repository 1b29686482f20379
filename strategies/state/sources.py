"""TensorSource: values that a tensor will have, of which each process reads only the blocks that it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..torch_internals.fake_tensors import is_without_memory
from .dtensor import is_dtensor, local_shard
from .shards import pieces_of


class TensorSource(Protocol):
    """Values of one tensor, that are somewhere else, such as in a file."""

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the values are kept."""

    def copy_to(self, target: Tensor, offsets: Sequence[int]) -> None:
        """Copy the block that begins at `offsets` and has the shape of `target` into `target`, in its dtype."""


def fill_from(tensor: Tensor, source: TensorSource) -> None:
    """Give a tensor the values at the beginning of a source: at once, or where a `DeferredInit` records, when it fills.

    Args:
        tensor: a tensor, or a view of its first rows. One without memory, as in an estimate, stays as it is.
        source: its values, of the same shape, or a larger one.
    """
    if has_torch_function((tensor,)):  # also in a mode
        handle_torch_function(fill_from, (tensor,), tensor, source)
    else:
        copy_whole(source, tensor)


def copy_whole(source: TensorSource, tensor: Tensor) -> None:
    """Copy the values at the beginning of a source into a plain tensor, unless it has no memory."""
    if not is_without_memory(tensor):
        with torch.no_grad():
            source.copy_to(tensor.detach(), (0,) * tensor.dim())


def copy_to_shard(source: TensorSource, target: Tensor) -> None:
    """Copy the blocks of a source that this rank holds into its shard of a DTensor, or all into a plain tensor."""
    if not is_dtensor(target):
        copy_whole(source, target)
        return
    local = local_shard(target)
    if local.numel():  # fully_shard gives an empty shard an odd shape
        for piece in pieces_of(target):
            source.copy_to(local[piece.here], piece.offsets)
