"""Random generators of devices: their states, and seeding one device alone."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from .kinds import CPU
from .queries import module_of, using_device

_FUNCTIONS: Final = ("get_rng_state", "set_rng_state", "manual_seed")


class DeviceGenerator(Protocol):
    """A generator of a device, as torch's own are."""

    def get_state(self) -> Tensor:
        """Return its state, on the host."""

    def set_state(self, state: Tensor) -> Any:
        """Continue from a state."""

    def manual_seed(self, seed: int) -> object:
        """Start again from a seed."""


class _ByModule:
    """The generator of a device whose module has functions for it, but does not hand it out."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, module_of(device)

    def get_state(self) -> Tensor:
        state: Tensor = self._module.get_rng_state(self._device)
        return state

    def set_state(self, state: Tensor) -> None:
        self._module.set_rng_state(state, self._device)

    def manual_seed(self, seed: int) -> None:
        with using_device(self._device):
            self._module.manual_seed(seed)


def device_generators(devices: Iterable[torch.device]) -> list[DeviceGenerator]:
    """Return the generators of those of these devices that have one of their own, which the CPU's is not.

    Their states are on the host, so nothing waits.
    """
    found: list[DeviceGenerator] = []
    for device in devices:
        module = None if device.type == CPU else module_of(device)
        if module is None:
            continue
        if hasattr(module, "default_generators"):
            if hasattr(module, "init"):
                module.init()  # they are made then
            found.append(module.default_generators[device.index or 0])
        elif all(hasattr(module, name) for name in _FUNCTIONS):  # else it draws from the CPU's, as far as we can see
            found.append(_ByModule(device))
    return found


def fork_generators(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """Return a context that restores the CPU's generator and those of these devices when it is left."""
    return _Forked(devices)


class _Forked:
    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._generators: list[DeviceGenerator] = [torch.default_generator, *device_generators(dict.fromkeys(devices))]

    def __enter__(self) -> None:
        self._states = [generator.get_state() for generator in self._generators]

    def __exit__(self, *error: object) -> None:
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)
