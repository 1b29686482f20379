"""ActivationOffload: moves what backward needs to the CPU and back, on streams beside the one that computes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, TypeAlias
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn

# Some milliseconds of a bus: what leaves and what comes back may take as much of the device's memory, or one tensor.
_IN_FLIGHT: Final = 256 << 20
_LOOK_BACK: Final = 32
"""The tensors before one that is fetched among which those are that backward needs next."""


class ActivationOffload:
    """Hooks of saved tensors that keep these on the CPU, in pinned memory where they come from a GPU.

    A GPU copies beside its computation. Forward waits only where more than 256 MB are on their way to the CPU. Backward
    takes what has not left yet as it is, and with each tensor it begins to fetch those that forward kept before it.
    What autograd keeps does not change before backward, so that it may be copied later.
    """

    def __init__(self) -> None:
        self._lanes: dict[torch.device, Lane] = {}

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return the context in which what is kept goes to the CPU."""
        return torch.autograd.graph.saved_tensors_hooks(self._keep, _fetch)

    def close(self) -> None:
        """Let go of what is on its way; what was kept can still be fetched."""
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()

    def _keep(self, tensor: Tensor) -> _Kept:
        whole = tensor if tensor._base is None else tensor._base  # noqa: SLF001
        if isinstance(whole, nn.Parameter):  # its memory is not freed anyway
            return tensor.device, tensor
        if not tensor.is_cuda or tensor.is_sparse or type(tensor) is not Tensor:
            return tensor.device, tensor.cpu()
        lane = self._lanes.get(tensor.device)
        if lane is None:
            lane = self._lanes[tensor.device] = Lane(tensor.device)
        return lane.keep(tensor)


class Lane:
    """The streams of one device to the CPU and back, and what is on its way there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._kept: WeakValueDictionary[int, Away] = WeakValueDictionary()
        self._numbers = count()
        self._leaving: deque[Away] = deque()
        self._ahead: WeakSet[Away] = WeakSet()

    def keep(self, tensor: Tensor) -> Away:
        """Begin to copy a tensor to the CPU, after what the current stream has been given to do."""
        computing = torch.cuda.current_stream(self._device)
        size = tensor.numel() * tensor.element_size()
        while self._leaving and size + sum(away.num_bytes for away in self._leaving) > _IN_FLIGHT:
            away = self._leaving.popleft()
            away.computing.wait_event(away.has_left)  # what it computes next may use the memory again
            away.original = None
        host = torch.empty(tensor.size(), dtype=tensor.dtype, pin_memory=True)
        self._out.wait_stream(computing)
        with torch.cuda.stream(self._out):
            host.copy_(tensor, non_blocking=True)
        away = Away(self, next(self._numbers), host, size, computing, _recorded(self._out), tensor)
        self._kept[away.number] = away
        self._leaving.append(away)
        return away

    def fetch(self, away: Away) -> Tensor:
        """Return a tensor on the device, for the current stream, and begin to fetch those kept before it."""
        computing = torch.cuda.current_stream(self._device)
        if away.original is not None:
            tensor, away.original = away.original, None
            self._leaving.remove(away)
            tensor.record_stream(self._out)  # rather than wait for a copy that nobody may need
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
        """Let go of the tensors that are on their way to the CPU, and arrive there all the same."""
        for away in self._leaving:
            assert away.original is not None
            away.original.record_stream(self._out)
            away.original = None
        self._leaving.clear()

    def drop(self, tensor: Tensor) -> None:
        """Note that a tensor on its way back is not needed: its memory is used again once the copy has ended."""
        tensor.record_stream(self._back)

    def _fetch_before(self, number: int, computing: Any) -> None:
        size = sum(away.num_bytes for away in self._ahead)
        for earlier in range(number - 1, max(-1, number - 1 - _LOOK_BACK), -1):
            away = self._kept.get(earlier)
            if away is None or away.original is not None or away.ahead is not None:
                continue
            size += away.num_bytes
            if size > _IN_FLIGHT and self._ahead:
                return
            self._begin(away, computing)

    def _begin(self, away: Away, computing: Any) -> None:
        """Begin to copy a tensor back to the device."""
        # memory of the computing stream, which has to do before what it used that for
        tensor = torch.empty(away.host.size(), dtype=away.host.dtype, device=self._device)
        self._back.wait_stream(computing)
        self._back.wait_event(away.has_left)
        with torch.cuda.stream(self._back):
            tensor.copy_(away.host, non_blocking=True)
        away.ahead = tensor, _recorded(self._back)
        self._ahead.add(away)


@dataclass(eq=False)
class Away:
    """A tensor of a device on the CPU, or on its way there or back."""

    lane: Lane
    number: int
    """The order in which tensors were kept."""
    host: Tensor
    num_bytes: int
    computing: Any
    """The stream that computed with it."""
    has_left: Any
    """The event after the copy to the CPU."""
    original: Tensor | None
    """The tensor itself, until `computing` has been told to wait for `has_left`."""
    ahead: tuple[Tensor, Any] | None = None
    """The copy on the device, fetched before it was asked for, and the event after which it is whole."""

    def __del__(self) -> None:
        if self.ahead is not None:
            self.lane.drop(self.ahead[0])


_Kept: TypeAlias = Away | tuple[torch.device, Tensor]


def _fetch(kept: _Kept) -> Tensor:
    if isinstance(kept, Away):
        return kept.lane.fetch(kept)
    device, tensor = kept
    return tensor.to(device, non_blocking=True)


def _recorded(stream: Any) -> Any:
    event = torch.cuda.Event()
    event.record(stream)
    return event
