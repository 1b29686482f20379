"""Prefetch of batches to a GPU: the copy of one runs beside the computation of the one before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...strategies.distributed.nested import iterate_tensors, named_leaves


class SideStream:
    """Moves batches to a device on a stream of its own.

    The host runs ahead of the device: while that computes a batch, the next one is copied, and what is computed with it
    waits for the copy alone. Where the batch lies in pinned memory, the host does not wait for the copy either.
    """

    def __init__(self, move: Callable[[Any], Any], device: torch.device) -> None:
        self._move, self._device = move, device
        self._stream = torch.cuda.Stream(device)

    def __call__(self, batch: Any) -> Any:
        """Return the batch on the device; the current stream computes with it once the copy has ended."""
        if any(callable(getattr(leaf, "to", None)) for _, leaf in named_leaves(batch) if not isinstance(leaf, Tensor)):
            return self._move(batch)  # what such an object holds cannot be seen, and so not be kept from reuse
        with torch.cuda.stream(self._stream):
            moved = self._move(batch)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        for tensor in iterate_tensors(moved):
            if tensor.is_cuda:
                # else its memory could be given to the next batch while this one is still computed with
                tensor.record_stream(computing)
        return moved
