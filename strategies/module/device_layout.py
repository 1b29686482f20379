"""Device layout: which part of a module is on which device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from ...common.errors import ConfigError, did_you_mean
from ..devices.kinds import CPU, is_accelerator, num_devices
from ..devices.memory import free_memory
from .blocks import repeated_blocks

_BYTES_PER_BYTE: Final = 4
"""Bytes of training memory per byte of parameter: the parameter, its gradient, and Adam's two averages."""


def parts_of(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the repeated blocks and the largest submodules that do not contain any, in the module's order."""
    blocks = dict(repeated_blocks(module))
    for name, child in module.named_children():
        if name in blocks or not any(block.startswith(f"{name}.") for block in blocks):
            if next(child.parameters(), None) is not None or next(child.buffers(), None) is not None:
                yield prefix + name, child
        else:
            yield from parts_of(child, f"{prefix}{name}.")


def deal_parts(module: nn.Module, devices: Sequence[torch.device], room: Sequence[float]) -> dict[str, torch.device]:
    """Return the device of each part: consecutive parts stay together, so that few tensors move between devices.

    Args:
        module: its parts are those of `parts_of`; parts that share a parameter are placed on one device.
        devices: the devices, in the order in which they are filled.
        room: the bytes of parameters that each device takes; the last one takes the rest.
    """
    layout: dict[str, torch.device] = {}
    owners: dict[nn.Parameter, torch.device] = {}
    index, used = 0, 0
    for name, part in parts_of(module):
        size = sum(parameter.nbytes for parameter in part.parameters() if parameter not in owners)
        shared = next((owners[parameter] for parameter in part.parameters() if parameter in owners), None)
        while shared is None and index < len(devices) - 1 and used + size > room[index]:
            index, used = index + 1, 0
        device = devices[index] if shared is None else shared
        used += size if device == devices[index] else 0
        layout[name] = device
        owners.update((parameter, device) for parameter in part.parameters())
    return layout


def room_on(devices: Sequence[torch.device], module: nn.Module) -> list[float]:
    """Return the bytes of parameters for each device: equal shares for several GPUs, and the rest for the CPU."""
    gpus = [device for device in devices if device.type != "cpu"]
    total = sum(parameter.nbytes for parameter in module.parameters())
    if len(gpus) == len(devices) or not gpus:
        largest = max((sum(p.nbytes for p in part.parameters()) for _, part in parts_of(module)), default=0)
        # a part is placed on a device with room for at least half of it
        return [total / len(devices) + largest / 2] * len(devices)
    free = [_room_of(device) for device in gpus]
    return [*free, *[float(total)] * (len(devices) - len(gpus))]


def _room_of(device: torch.device) -> float:
    free = free_memory(device)
    if free is None:
        raise ConfigError(
            f"strategy='device_map' divides a module by the free memory of {device}, which torch cannot tell for "
            f"{device.type}; give device_map as a dictionary from submodule names to devices."
        )
    return free * 0.9 / _BYTES_PER_BYTE


def check_device_map(device_map: Mapping[str, Any]) -> dict[str, torch.device]:
    """Check every device in a map from submodule names to devices, and return the map with torch devices.

    Raises:
        ConfigError: for a value that is not a device of this machine.
    """
    checked: dict[str, torch.device] = {}
    for name, value in device_map.items():
        try:
            device = torch.device(value)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(
                f"device_map[{name!r}] must be a device such as 'cuda:0' or 'cpu', got {value!r}."
            ) from error
        number = num_devices(device.type)
        if is_accelerator(device.type) and (device.index or 0) >= number:
            raise ConfigError(
                f"device_map[{name!r}] is {value!r}, but this machine has {number} {device.type} device(s); choose "
                "another."
            )
        checked[name] = torch.device(device.type, 0) if device.type != CPU and device.index is None else device
    return checked


def match_device_map(module: nn.Module, device_map: Mapping[str, torch.device]) -> dict[str, torch.device]:
    """Return the device of each submodule that the map names; ``""`` covers everything that no other name does.

    Raises:
        ConfigError: for a name that the module does not have, tensors that no name covers, and parameters shared by
            two parts on different devices.
    """
    known = {name for name, _ in module.named_modules()}
    for name in device_map:
        if name not in known:
            raise ConfigError(f"device_map names {name!r}, which is not a submodule.{did_you_mean(name, known - {''})}")
    owners: dict[object, tuple[str, torch.device]] = {}
    for name, tensor in [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]:
        owner = device_of(name, device_map)
        if owner is None:
            raise ConfigError(
                f"device_map has no device for {name}; give the device of a submodule that contains it, or of '' for "
                "everything else."
            )
        other, device = owners.setdefault(tensor, (name, owner))
        if device != owner:
            raise ConfigError(
                f"{other} and {name} are one parameter, but device_map puts them on {device} and {owner}; put both "
                "on one device."
            )
    return dict(device_map)


def device_of(name: str, layout: Mapping[str, torch.device]) -> torch.device | None:
    """Return the device of a tensor by its name: that of the innermost submodule that the layout names."""
    parts = name.split(".")[:-1]
    for length in range(len(parts), -1, -1):
        device = layout.get(".".join(parts[:length]))
        if device is not None:
            return device
    return None
