"""Batch sizes: the number of samples, and of tokens, in a batch, read from its tensors."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from ...common.errors import ModuleError
from ...strategies.distributed.nested import iterate_tensors, named_leaves

_INTEGERS: Final = (torch.int64, torch.int32, torch.int16, torch.uint8)


def size_of(batch: object) -> int:
    """Return the number of samples of a batch: the length of its first tensor; 1 if it has none."""
    first = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if not isinstance(first, Tensor):
        first = next(iterate_tensors(batch), None)
    return first.shape[0] if first is not None and first.dim() else 1


def warn_of_unclear_size(batch: object) -> None:
    """Warn if the tensors of a batch differ in their first dimension, which `size_of` takes as the batch size.

    Call it with the first batch of a loader whose batch size is unknown.
    """
    sizes = [(name, leaf.shape[0]) for name, leaf in named_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    other = next((each for each in sizes if each[1] != sizes[0][1]), None)
    if other is not None:
        (name, size), (other_name, other_size) = sizes[0], other
        warnings.warn(
            f"The batch size is not clear: batch{name} has {size} entries and batch{other_name} {other_size}; {size} "
            "is used. Define batch_size_of(self, batch) in the module, or pass batch_size= to self.log.",
            stacklevel=2,
        )


def tokens_in(batch: object) -> int:
    """Return the tokens of a batch that are no padding, as far as it says so.

    In a mapping, those of documents (``document_ids`` of packs), else of ``attention_mask``, else all of
    ``input_ids``; in another structure, all elements of the first tensor of integers with two dimensions or more.

    Raises:
        ModuleError: for a batch without any of these.
    """
    if isinstance(batch, Mapping):
        documents, mask, ids = (batch.get(name) for name in ("document_ids", "attention_mask", "input_ids"))
        if isinstance(documents, Tensor):
            return int((documents >= 0).sum())
        if isinstance(mask, Tensor) and isinstance(ids, Tensor) and mask.shape == ids.shape:
            return int((mask != 0).sum())
        if isinstance(ids, Tensor):
            return ids.numel()
    for tensor in iterate_tensors(batch):
        if tensor.dtype in _INTEGERS and tensor.dim() > 1:
            return tensor.numel()
    raise ModuleError(
        f"Tokens are counted (max_tokens, or an interval in tokens), but a batch must have input_ids, or integers with "
        f"two dimensions, to count them, got a {type(batch).__name__}; define tokens_of(self, batch) in the module."
    )
