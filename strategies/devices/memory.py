"""Memory of a device: how much there is, how much torch holds, and giving back what it keeps for later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .kinds import CPU, available_types, device_module
from .queries import module_of


def total_memory(device: torch.device) -> float | None:
    """Return the bytes of a device; None where torch cannot tell."""
    module = module_of(device)
    if hasattr(module, "get_device_properties"):
        total = getattr(module.get_device_properties(device), "total_memory", None)
        if total is not None:
            return float(total)
    if hasattr(module, "mem_get_info"):
        return float(module.mem_get_info(device)[1])
    most = getattr(module, "recommended_max_memory", None)  # MPS, which shares the memory of the machine
    return None if most is None else float(most())


def free_memory(device: torch.device) -> float | None:
    """Return the bytes of a device that no program holds; None where torch cannot tell."""
    module = module_of(device)
    if hasattr(module, "mem_get_info"):
        return float(module.mem_get_info(device)[0])
    if hasattr(module, "recommended_max_memory"):
        return float(module.recommended_max_memory() - module.driver_allocated_memory())
    return None


def peak_allocated(device: torch.device) -> int:
    """Return the most bytes of tensors that this process has held on a device at once; 0 where nobody counts them."""
    most = None if device.type == CPU else getattr(module_of(device), "max_memory_allocated", None)
    return 0 if most is None else int(most(device))


def memory_stats(device: torch.device) -> Mapping[str, Any]:
    """Return what the allocator of a device counts, by torch's names; empty where it counts nothing."""
    stats = None if device.type == CPU else getattr(module_of(device), "memory_stats", None)
    return {} if stats is None else stats(device)


def empty_caches() -> None:
    """Give back what the allocators of all devices here keep for later."""
    for device_type in available_types():
        empty = getattr(device_module(device_type), "empty_cache", None)
        if empty is not None:
            empty()
