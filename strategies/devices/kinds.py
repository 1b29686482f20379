"""Types of devices: those that torch knows under a name, those of them that are here, and what `accelerator` means."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Final

import torch

from ...common.errors import ConfigError, did_you_mean
from ..torch_internals.operators import is_in_bad_fork, read_registered_name

CPU: Final = "cpu"

_GPUS: Final = ("cuda", "mps", "xpu", "musa")
"""What ``accelerator="gpu"`` may mean; the first that is here is taken. AMD's GPUs are ``cuda`` to torch, too."""

_PACKAGES: Final = {"npu": "torch_npu", "hpu": "habana_frameworks.torch", "tpu": "torch_tpu", "musa": "torch_musa"}
"""The packages that add devices to torch; without its package, torch does not know the name."""

_OTHERS: Final = ("mtia",)

_DEVICES: Final = tuple(dict.fromkeys((*_GPUS, *_PACKAGES, *_OTHERS)))


def device_module(device_type: str) -> ModuleType | None:
    """Return torch's module of a type of device, such as ``torch.xpu``; None if this torch has none of that name."""
    try:
        return torch.get_device_module(device_type)
    except RuntimeError:  # unknown, or known without a module
        return None


def is_available(device_type: str) -> bool:
    """Return whether torch can use a device of this type now, on this machine."""
    module = device_module(device_type)
    return module is not None and bool(module.is_available())


def is_accelerator(device_type: str) -> bool:
    """Return whether devices of this type compute, and are not the CPU: ``meta``, for one, has no values."""
    return device_type != CPU and device_module(device_type) is not None


def num_devices(device_type: str) -> int:
    """Return the number of devices of a type that torch finds here; 1 for the CPU."""
    if device_type == CPU:
        return 1
    module = device_module(device_type)
    return int(module.device_count()) if module is not None and module.is_available() else 0


def accelerator_of_build() -> str:
    """Return the type of device that this build of torch is for, whether there is one or not; ``cpu`` for none."""
    device = torch.accelerator.current_accelerator(check_available=False)
    return CPU if device is None else device.type


def known_types() -> Iterator[str]:
    """Yield the types of devices other than the CPU that this torch has a module for; what it reports comes first."""
    for name in dict.fromkeys((accelerator_of_build(), read_registered_name(), *_DEVICES)):
        if name != CPU and device_module(name) is not None:
            yield name


def available_types() -> list[str]:
    """Return the types of devices that are here, other than the CPU."""
    return [name for name in known_types() if is_available(name)]


def are_unusable() -> bool:
    """Return whether this process cannot use the devices here, as it was forked from one that had initialized them."""
    return any(is_in_bad_fork(device_module(name)) for name in known_types())


def device_type_of(accelerator: str) -> str:
    """Return the type of device that an ``accelerator`` argument means.

    Args:
        accelerator: ``auto`` for what torch reports, ``cpu``, ``gpu`` for the GPUs that are here, or the name of a type
            of device, which another package may have registered in torch.

    Raises:
        ConfigError: for a name that torch does not know, or a device that is not here; it says what is.
    """
    if accelerator == CPU:
        return CPU
    available = available_types()
    if accelerator == "auto":
        return available[0] if available else CPU
    if accelerator == "gpu":
        gpus = [name for name in _GPUS if name in available]
        if not gpus:
            raise ConfigError(
                f"accelerator='gpu', but torch finds no GPU on this machine; {_suggest_accelerators(available)}."
            )
        return gpus[0]
    if accelerator in available:
        return accelerator
    known = ("auto", CPU, "gpu", *_DEVICES, *known_types())
    if accelerator not in known:
        raise ConfigError(
            f"accelerator={accelerator!r} is not a known accelerator.{did_you_mean(str(accelerator), known)} "
            f"{_describe_devices_here(available)}"
        )
    package = _PACKAGES.get(accelerator)
    is_missing = package is not None and device_module(accelerator) is None
    added = f"install {package}, which adds it to torch, or " if is_missing else ""
    raise ConfigError(
        f"accelerator={accelerator!r}, but torch finds no such device on this machine; "
        f"{added}{_suggest_accelerators(available)}."
    )


def _suggest_accelerators(available: list[str]) -> str:
    names = [repr(name) for name in (*available, CPU)]
    return f"use accelerator={' or '.join(names)} or 'auto'"


def _describe_devices_here(available: list[str]) -> str:
    counts = [f"{name} ({num_devices(name)} device(s))" for name in available]
    return f"On this machine are: {', '.join([CPU, *counts])}."
