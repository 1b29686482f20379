"""Streams and events of a device, and whether copies to and from it can run beside computation."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor

from .kinds import CPU, device_module
from .queries import module_of

_NEEDED: Final = ("Stream", "Event", "stream", "current_stream")


def has_streams(device: torch.device) -> bool:
    """Return whether programs have streams and events on a device; without them, copies to the host wait (MPS)."""
    return _has_streams(device.type)


@functools.cache
def _has_streams(device_type: str) -> bool:
    module = None if device_type == CPU else device_module(device_type)
    return all(hasattr(module, name) for name in _NEEDED)


def has_events(device: torch.device) -> bool:
    """Return whether programs can note how far a device has come; MPS has events, but no streams."""
    return device.type != CPU and hasattr(module_of(device), "Event")


def pins_memory(device: torch.device) -> bool:
    """Return whether host memory can be pinned for a device, so that copies to it need not wait."""
    return has_streams(device) and _can_pin(device.type)


@functools.cache
def _can_pin(device_type: str) -> bool:
    """Try it once: a device that another package adds may lack it, and torch pins for one type only."""
    try:
        torch.empty(1, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return False
    return True


def numbers_on(device: torch.device, numbers: list[float], dtype: torch.dtype | None) -> Tensor:
    """Return numbers as a tensor on a device, without waiting for the work queued there."""
    tensor = torch.tensor(numbers, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if pins_memory(device) else tensor.to(device)


def new_stream(device: torch.device) -> Any:
    """Return a new stream of a device."""
    return module_of(device).Stream(device)


def current_stream(device: torch.device) -> Any:
    """Return the stream that this thread now gives work for a device to."""
    return module_of(device).current_stream(device)


def on_stream(device: torch.device, stream: object) -> AbstractContextManager[object]:
    """Return a context in which this thread gives its work to a stream of a device."""
    context: AbstractContextManager[object] = module_of(device).stream(stream)
    return context


def new_event(device: torch.device, **options: bool) -> Any:
    """Return a new event, not recorded yet, with options such as ``blocking`` or ``enable_timing``."""
    return module_of(device).Event(**options)


def recorded_event(device: torch.device, stream: object = None, **options: bool) -> object:
    """Return an event after the work that a stream, by default the current device's current one, was given so far."""
    event = new_event(device, **options)
    event.record() if stream is None else event.record(stream)
    return event
