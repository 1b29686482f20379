"""Questions about one device, and the few commands that every device takes."""

from __future__ import annotations

import socket
from contextlib import AbstractContextManager
from typing import Any

import torch

from ...common.errors import ConfigError
from .kinds import CPU, device_module, is_available


def module_of(device: torch.device) -> Any:
    """Return torch's module of a device's type, such as ``torch.xpu``; None for devices without one, such as meta."""
    return device_module(device.type)


def name_of(device: torch.device) -> str | None:
    """Return the name of the product, such as ``NVIDIA H100 80GB HBM3``; None where torch cannot tell."""
    get = getattr(module_of(device), "get_device_name", None)
    return None if get is None else str(get(device))


def set_current(device: torch.device) -> None:
    """Make a device the one that this thread's streams, events and collectives take; the CPU is left alone."""
    if device.type == CPU:
        return
    select = getattr(module_of(device), "set_device", None)
    if select is not None:  # a type with a single device has none
        select(device)


def check_usable(device: torch.device) -> None:
    """Take a device for this process, as the first tensor on it does; the CPU is left alone.

    Raises:
        ConfigError: if it cannot be had, as where a device takes one process at a time (CUDA's compute mode
            EXCLUSIVE_PROCESS) or others have filled its memory.
    """
    if device.type == CPU or not is_available(device.type):
        return
    try:
        torch.empty(1, device=device)
    except RuntimeError as error:  # torch.AcceleratorError, or another package's; OutOfMemoryError, too
        reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
        raise ConfigError(
            f"{device} on {socket.gethostname()} cannot be used: {reason}. Another process may hold it or its memory: "
            "end that one, or choose other devices, such as devices=[1]."
        ) from error


def using_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which a device is this thread's current one."""
    own = getattr(module_of(device), "device", None)
    context: AbstractContextManager[object] = (
        torch.accelerator.device_index(device.index) if own is None else own(device)
    )
    return context


def synchronize_device(device: torch.device) -> None:
    """Wait until a device has finished what it was given; the CPU always has."""
    if device.type != CPU:
        # not `torch.accelerator.synchronize`: of two types of devices in one process it knows the first
        module_of(device).synchronize(device) if _takes_device(device) else module_of(device).synchronize()


def _takes_device(device: torch.device) -> bool:
    return device.index is not None and hasattr(module_of(device), "set_device")
