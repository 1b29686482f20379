"""ActivationOffload: moves saved activations to the CPU and back, on streams beside the compute stream."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, TypeAlias
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn

from ..devices.streams import current_stream, has_streams, new_stream, on_stream, pins_memory, recorded_event
from ..torch_internals.tensors import find_base

# Bytes that may be in flight in each direction, or a single tensor: a few milliseconds of bus traffic.
_IN_FLIGHT: Final = 256 << 20
_LOOK_BACK: Final = 32
"""How many tensors saved before a fetched one to consider for prefetching, as backward needs them next."""


class ActivationOffload:
    """Saved-tensor hooks that keep tensors on the CPU, in pinned memory if they come from a GPU.

    Copies overlap with computation. Forward waits only when more than 256 MB are on their way to the CPU. Backward
    uses a tensor that has not left yet directly, and with each tensor it starts to fetch those that were saved before
    it. Tensors that autograd saves do not change before backward, so copying them later is safe.
    """

    def __init__(self) -> None:
        self._lanes: dict[torch.device, Lane] = {}

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return the context in which saved tensors are moved to the CPU."""
        return torch.autograd.graph.saved_tensors_hooks(self._keep, _fetch_tensor)

    def close(self) -> None:
        """Release the tensors in flight; saved ones can still be fetched."""
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()

    def _keep(self, tensor: Tensor) -> _Kept:
        if isinstance(find_base(tensor), nn.Parameter):  # its memory would not be freed anyway
            return tensor.device, tensor
        if not has_streams(tensor.device) or tensor.is_sparse or type(tensor) is not Tensor:
            return tensor.device, tensor.cpu()
        lane = self._lanes.get(tensor.device)
        if lane is None:
            lane = self._lanes[tensor.device] = Lane(tensor.device)
        return lane.keep(tensor)


class Lane:
    """The streams of one device to the CPU and back, and the tensors in flight on them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = new_stream(device), new_stream(device)
        self._kept: WeakValueDictionary[int, Away] = WeakValueDictionary()
        self._numbers = count()
        self._leaving: deque[Away] = deque()
        self._ahead: WeakSet[Away] = WeakSet()

    def keep(self, tensor: Tensor) -> Away:
        """Start to copy a tensor to the CPU, after the work already queued on the current stream."""
        computing = current_stream(self._device)
        size = tensor.numel() * tensor.element_size()
        while self._leaving and size + sum(away.num_bytes for away in self._leaving) > _IN_FLIGHT:
            away = self._leaving.popleft()
            away.computing.wait_event(away.has_left)  # its next computation may reuse the memory
            away.original = None
        host = torch.empty(tensor.size(), dtype=tensor.dtype, pin_memory=pins_memory(self._device))
        self._out.wait_stream(computing)
        with on_stream(self._device, self._out):
            host.copy_(tensor, non_blocking=True)
        away = Away(self, next(self._numbers), host, size, computing, recorded_event(self._device, self._out), tensor)
        self._kept[away.number] = away
        self._leaving.append(away)
        return away

    def fetch(self, away: Away) -> Tensor:
        """Return a tensor on the device, for the current stream, and start to fetch those saved before it."""
        computing = current_stream(self._device)
        if away.original is not None:
            tensor, away.original = away.original, None
            self._leaving.remove(away)
            tensor.record_stream(self._out)  # rather than wait for a copy that may not be needed
        else:
            if away.ahead is None:
                self._begin(away, computing)
            assert away.ahead is not None
            (tensor, has_arrived), away.ahead = away.ahead, None
            self._ahead.discard(away)
            computing.wait_event(has_arrived)
        self._fetch_before(away.number, computing)
        return tensor

    def close(self) -> None:
        """Release the tensors on their way to the CPU; their copies still complete."""
        for away in self._leaving:
            assert away.original is not None
            away.original.record_stream(self._out)
            away.original = None
        self._leaving.clear()

    def drop(self, tensor: Tensor) -> None:
        """Discard a tensor on its way back; its memory is reused once the copy has finished."""
        tensor.record_stream(self._back)

    def _fetch_before(self, number: int, computing: object) -> None:
        size = sum(away.num_bytes for away in self._ahead)
        for earlier in range(number - 1, max(-1, number - 1 - _LOOK_BACK), -1):
            away = self._kept.get(earlier)
            if away is None or away.original is not None or away.ahead is not None:
                continue
            size += away.num_bytes
            if size > _IN_FLIGHT and self._ahead:
                return
            self._begin(away, computing)

    def _begin(self, away: Away, computing: object) -> None:
        """Start to copy a tensor back to the device."""
        # allocated on the computing stream, whose earlier work may still use that memory
        tensor = torch.empty(away.host.size(), dtype=away.host.dtype, device=self._device)
        self._back.wait_stream(computing)
        self._back.wait_event(away.has_left)
        with on_stream(self._device, self._back):
            tensor.copy_(away.host, non_blocking=True)
        away.ahead = tensor, recorded_event(self._device, self._back)
        self._ahead.add(away)


@dataclass(eq=False)
class Away:
    """A device's tensor that is on the CPU, or on its way there or back."""

    lane: Lane
    number: int
    """The position in the order in which tensors were saved."""
    host: Tensor
    num_bytes: int
    computing: Any
    """The stream that computed with it."""
    has_left: object
    """The event after the copy to the CPU."""
    original: Tensor | None
    """The tensor itself, until `computing` has been told to wait for `has_left`."""
    ahead: tuple[Tensor, object] | None = None
    """The prefetched copy on the device, and the event after which it is complete."""

    def __del__(self) -> None:
        if self.ahead is not None:
            self.lane.drop(self.ahead[0])


_Kept: TypeAlias = Away | tuple[torch.device, Tensor]


def _fetch_tensor(kept: _Kept) -> Tensor:
    if isinstance(kept, Away):
        return kept.lane.fetch(kept)
    device, tensor = kept
    return tensor.to(device, non_blocking=True)
