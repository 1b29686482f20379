"""HostCopy: a copy of a step's output from a GPU to the host, while the next step runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...strategies.devices.streams import current_stream, has_streams, pins_memory, recorded_event
from ...strategies.distributed.nested import map_tensors


class HostCopy:
    """A copy of an output on the CPU; from a GPU, it is complete once `finish` has been called."""

    def __init__(self, output: object) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._events: dict[torch.device, Any] = {}
        self.output: Any = map_tensors(self._begin, output)
        """The output with its tensors on the CPU; those that already were are not copied."""

    def _begin(self, tensor: Tensor) -> Tensor:
        if not has_streams(tensor.device) or type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return tensor.cpu()
        kept = torch.empty(tensor.shape, dtype=tensor.dtype)
        staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pins_memory(tensor.device))
        staged.copy_(tensor, non_blocking=True)
        self._events[tensor.device] = recorded_event(tensor.device, current_stream(tensor.device))
        self._pairs.append((kept, staged))
        return kept

    def finish(self) -> None:
        """Wait for the copy; its pinned memory is reused for the next one."""
        for event in self._events.values():
            event.synchronize()
        for kept, staged in self._pairs:
            kept.copy_(staged)
        self._pairs, self._events = [], {}
