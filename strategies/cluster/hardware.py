"""Hardware of a run: the devices that it uses on each of its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ...common.errors import ConfigError
from ..devices.kinds import device_type_of, num_devices
from .environment import Environment
from .launchers import detect_environment


@dataclass(frozen=True)
class Hardware:
    """The devices of a node, by index, and the number of nodes; `of` resolves and checks them."""

    device_type: str
    devices: tuple[int, ...]
    num_nodes: int = 1
    environment: Environment = field(default_factory=lambda: detect_environment({}))
    """The processes that exist, or that will be started."""

    def for_processes(self, environment: Environment) -> Hardware:
        """Return this hardware with one device for each process of `environment` on this node.

        Raises:
            ConfigError: if there are fewer devices.
        """
        count, devices = environment.local_world_size, self.devices
        if self.device_type == "cpu":
            devices = tuple(range(count))
        elif len(devices) == 1:  # the launcher lets each process see only its own device
            devices *= count
        elif len(devices) < count:
            raise ConfigError(
                f"{environment.describe()}, but this machine has {len(devices)} {self.device_type} device(s); start "
                "one process per device."
            )
        return replace(self, devices=devices[:count], num_nodes=environment.num_nodes, environment=environment)

    def describe(self, found: Environment) -> str:
        """Return a line about the processes that have met; each node may have another number of devices.

        Args:
            found: the environment of one of them.
        """
        total, here = found.world_size, found.local_world_size
        return replace(self.environment, world_size=total, local_world_size=here).describe()

    def device(self, local_rank: int) -> torch.device:
        """Return the device of the process with this local rank."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.device_type, self.devices[local_rank])

    def list_devices(self) -> list[torch.device]:
        """Return the devices of this node, in the order of the local ranks that have one each."""
        return [self.device(index) for index in range(len(self.devices))]

    @classmethod
    def of(cls, accelerator: str, devices: int | str | Sequence[int], num_nodes: int) -> Hardware:
        """Resolve ``accelerator`` and ``devices`` as Lightning does: ``"auto"``, a count, ``-1``, or indices.

        Raises:
            ConfigError: for an accelerator or a device that this machine does not have.
        """
        device_type = device_type_of(accelerator)
        if num_nodes < 1:
            raise ConfigError(f"num_nodes must be >= 1, got {num_nodes}; give the number of machines.")
        return cls(device_type, _device_indices(device_type, devices), num_nodes)


def _device_indices(device_type: str, devices: int | str | Sequence[int]) -> tuple[int, ...]:
    available = num_devices(device_type)
    if isinstance(devices, str):
        devices = _parse_devices(devices)
    if isinstance(devices, bool) or not isinstance(devices, int | Sequence):
        raise ConfigError(
            f"devices must be a number, -1 for all, 'auto' or a list of indices, got {devices!r}; give one of these."
        )
    if isinstance(devices, int):
        if devices == -1:
            return tuple(range(available))
        if devices < 1:
            raise ConfigError(f"devices must be >= 1, or -1 for all, got {devices}; give a number of devices.")
        indices = tuple(range(devices))
    else:
        indices = tuple(int(index) for index in devices)
    if device_type != "cpu" and (not indices or max(indices) >= available or len(set(indices)) < len(indices)):
        raise ConfigError(
            f"devices={devices!r}, but this machine has {available} {device_type} device(s); choose from those."
        )
    return indices or (0,)


def _parse_devices(devices: str) -> int | list[int]:
    if devices == "auto":
        return -1
    try:
        return [int(index) for index in devices.split(",") if index] if "," in devices else int(devices)
    except ValueError:
        raise ConfigError(
            f"devices must be a number, 'auto' or indices such as '0,1', got {devices!r}; give one of these."
        ) from None
