"""DeviceMapStrategy: one process places the parts of a module on several devices, if it does not fit on one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from ..common.errors import ConfigError
from .cluster.hardware import Hardware
from .devices.kinds import is_accelerator
from .module.device_layout import check_device_map, deal_parts, match_device_map, room_on
from .module.precision import Precision
from .placed.by_map import PlacedByMap
from .placed.placed import Placed
from .strategy import Strategy


class DeviceMapStrategy(Strategy):
    """Train, in one process, a module whose parts are on several devices; a part's inputs are moved to its device.

    Only one device computes at a time: this makes room for a larger module, and does not make it faster. The outputs of
    the module's forward and of its direct children are moved back to the first device, where the batch is.

    Args:
        device_map: the device of each submodule by name, such as ``{"embed": "cuda:0", "layers": "cpu", "": "cpu"}``;
            the innermost name counts, and ``""`` is everything else. ``"auto"`` distributes the repeated blocks and the
            modules around them by size: evenly over several GPUs; with one GPU, what fits on it, and the rest on the
            CPU.

    Example::

        Trainer(strategy=DeviceMapStrategy({"backbone": "cpu", "": "cpu"}), max_epochs=1).fit(module, train_loader)
    """

    name: ClassVar[str] = "device_map"
    uses_many_devices: ClassVar[bool] = True

    def __init__(self, device_map: Mapping[str, Any] | Literal["auto"] = "auto") -> None:
        super().__init__()
        if not isinstance(device_map, Mapping) and device_map != "auto":
            raise ConfigError(
                f"device_map must be 'auto' or a dict from names of submodules to devices, got {device_map!r:.80}; "
                "give one of these."
            )
        self.device_map = device_map
        self.layout: dict[str, torch.device] = {}
        """The device of each part by its name; known after `place`."""

    def validate(self, hardware: Hardware, precision: Precision) -> None:
        if hardware.num_nodes != 1:
            raise ConfigError(
                f"strategy='device_map' runs in one process on one machine, but num_nodes={hardware.num_nodes}; set "
                "num_nodes=1, or use strategy='fsdp'."
            )
        super().validate(hardware, precision)
        if isinstance(self.device_map, Mapping):
            check_device_map(self.device_map)

    def connect(self, hardware: Hardware, precision: Precision) -> None:
        super().connect(hardware, precision)
        self._devices = hardware.list_devices()
        if len(self._devices) == 1 and self.device.type != "cpu":
            self._devices.append(torch.device("cpu"))

    @property
    def devices(self) -> Sequence[torch.device]:
        """All devices on which the module computes; the CPU counts where it is the first."""
        named = check_device_map(self.device_map).values() if isinstance(self.device_map, Mapping) else self._devices
        return tuple(dict.fromkeys((self.device, *(device for device in named if is_accelerator(device.type)))))

    def make_placed(self, module: nn.Module, *, is_manual: bool = False) -> Placed:
        if self._last_placed is not None and self._last_placed.module is module:
            self._last_placed.close()  # the hooks of an earlier run
        self.precision.convert_module(module)
        if isinstance(self.device_map, Mapping):
            self.layout = match_device_map(module, check_device_map(self.device_map))
        else:
            rest = {"": self._devices[0]}
            self.layout = {**rest, **deal_parts(module, self._devices, room_on(self._devices, module))}
        placed = PlacedByMap(self.site, module, self.layout)
        self.precision.convert_module(module)  # torchmetrics' objects that have moved compute in float32
        return placed
