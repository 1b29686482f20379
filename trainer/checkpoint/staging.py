"""Staging: copies of tensors to host memory, from a device through pinned buffers of bounded size."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from ...strategies.devices.queries import using_device
from ...strategies.devices.streams import current_stream, has_streams, new_stream, on_stream, recorded_event

Copies: TypeAlias = list[tuple[Tensor, Tensor]]
"""Pairs of a host buffer and the tensor to copy into it."""
Marks: TypeAlias = Mapping[torch.device, object]
"""For each device, an event after the work queued on it."""

# Large enough for the full rate of PCIe 5; pinning more would only lock memory that the program may need. A power of
# two, since torch's pinned-memory allocator rounds up to one.
_CHUNK: Final = 64 << 20
_NUM_CHUNKS: Final = 2

_log = logging.getLogger("echelon")


def record_events(copies: Copies) -> Marks:
    """Return events after the work that is now queued on the devices of these tensors."""
    marks = {}
    for device in _by_device(copies):
        marks[device] = recorded_event(device, current_stream(device))
    return marks


def copy_all(copies: Copies, after: Marks | None = None) -> None:
    """Copy tensors into their buffers, with a separate stream per device, and return when that is done.

    It may be called from any thread. The buffers are ordinary memory of exact sizes, since a pinned copy of a whole
    state could take more memory than the machine has.

    Args:
        copies: the copies to make.
        after: the events to wait for; by default, after all work now queued on the devices.
    """
    for buffer, tensor in copies:
        if not has_streams(tensor.device):
            buffer.copy_(tensor)
    marks = record_events(copies) if after is None else after
    for device, on_device in _by_device(copies).items():
        # that of a thread is the first one, whatever the rank's is; a stream alone would bring its device along, and go
        # back to the first by asking for it, with which this process takes memory there
        stream = new_stream(device)
        with using_device(device), on_stream(device, stream), torch.no_grad():
            stream.wait_event(marks[device])
            _copy_through_pinned(on_device, device, stream)


def _by_device(copies: Copies) -> dict[torch.device, Copies]:
    grouped: dict[torch.device, Copies] = {}
    for buffer, tensor in copies:
        if has_streams(tensor.device):
            grouped.setdefault(tensor.device, []).append((buffer, tensor))
    return grouped


def _copy_through_pinned(copies: Copies, device: torch.device, stream: Any) -> None:
    """Copy in chunks: while the device fills one, the host empties the other."""
    try:
        chunks = [_Chunk(device) for _ in range(_NUM_CHUNKS)]
    except RuntimeError as error:
        _log.warning(
            "Memory cannot be pinned (%s); the state is copied from the device to pageable memory, which is slower.",
            error,
        )
        for buffer, tensor in copies:
            buffer.copy_(tensor)
        stream.synchronize()
        return
    turn = 0
    for target, source in _split_into_chunks(copies):
        if not chunks[turn].fits(source):
            chunks[turn].seal(stream)
            turn = (turn + 1) % _NUM_CHUNKS
            chunks[turn].empty()
        chunks[turn].take(target, source)
    chunks[turn].seal(stream)
    for chunk in chunks:
        chunk.empty()


def _split_into_chunks(copies: Copies) -> Iterable[tuple[Tensor, Tensor]]:
    """Yield the bytes of buffers and tensors, at most a chunk at a time."""
    for buffer, tensor in copies:
        if tensor.numel():
            targets = buffer.reshape(-1).view(torch.uint8).split(_CHUNK)
            sources = tensor.detach().reshape(-1).view(torch.uint8).split(_CHUNK)
            yield from zip(targets, sources, strict=True)


class _Chunk:
    """Pinned memory that the device fills, and the places that the host copies it to."""

    def __init__(self, device: torch.device) -> None:
        self._memory, self._used = torch.empty(_CHUNK, dtype=torch.uint8, pin_memory=True), 0
        self._device = device
        self._held: list[tuple[Tensor, Tensor]] = []
        self._is_full: Any = None

    def fits(self, source: Tensor) -> bool:
        return self._used + source.numel() <= _CHUNK

    def take(self, target: Tensor, source: Tensor) -> None:
        place = self._memory[self._used : self._used + source.numel()]
        place.copy_(source, non_blocking=True)
        self._held.append((target, place))
        self._used += source.numel()

    def seal(self, stream: object) -> None:
        self._is_full = recorded_event(self._device, stream)

    def empty(self) -> None:
        if self._is_full is None:
            return
        self._is_full.synchronize()
        for target, place in self._held:
            target.copy_(place)
        self._held, self._used, self._is_full = [], 0, None
