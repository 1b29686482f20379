"""Prefetch of batches to a GPU: one batch is copied while the previous one is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...strategies.distributed.nested import iterate_tensors, named_leaves


class SideStream:
    """Moves batches to a device on a stream of its own.

    The host runs ahead of the device: while the device computes one batch, the next one is copied, and its computation
    waits only for that copy. If the batch is in pinned memory, the host does not wait for the copy either.
    """

    def __init__(self, move: Callable[[Any], Any], device: torch.device) -> None:
        self._move, self._device = move, device
        self._stream = torch.cuda.Stream(device)

    def __call__(self, batch: Any) -> Any:
        """Return the batch on the device; the current stream uses it once the copy is complete."""
        if any(callable(getattr(leaf, "to", None)) for _, leaf in named_leaves(batch) if not isinstance(leaf, Tensor)):
            return self._move(batch)  # the memory of such an object is unknown, and cannot be protected from reuse
        with torch.cuda.stream(self._stream):
            moved = self._move(batch)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        for tensor in iterate_tensors(moved):
            if tensor.is_cuda:
                # otherwise its memory could be given to the next batch while this one is still in use
                tensor.record_stream(computing)
        return moved
