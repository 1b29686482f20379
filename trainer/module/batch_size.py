"""Batch sizes: the number of samples in a batch, read from its tensors."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor

from ...strategies.distributed.nested import iterate_tensors, named_leaves


def size_of(batch: Any) -> int:
    """Return the number of samples of a batch: the length of its first tensor; 1 if it has none."""
    first = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if not isinstance(first, Tensor):
        first = next(iterate_tensors(batch), None)
    return first.shape[0] if first is not None and first.dim() else 1


def warn_of_unclear_size(batch: Any) -> None:
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
