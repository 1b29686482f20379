"""DeviceMapStrategy: one process places the parts of a module on several devices, if it does not fit on one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from ..common.errors import ConfigError
from .cluster.hardware import Hardware
from .devices.kinds import is_accelerator
from .devices.moves import keeping_parameters
from .distributed.nested import can_copy_later, map_tensors
from .module.device_layout import check_device_map, deal_parts, device_of, match_device_map, room_on
from .module.precision import Precision
from .strategy import Strategy
from .torch_tensors import apply_to_own_tensors


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
        """The device of each part by its name; known after `setup_module`."""
        self._handles: list[Any] = []

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
        self._devices = [hardware.device(index) for index in range(len(hardware.devices))]
        if len(self._devices) == 1 and self.device.type != "cpu":
            self._devices.append(torch.device("cpu"))

    @property
    def devices(self) -> Sequence[torch.device]:
        """All devices on which the module computes; the CPU counts where it is the first."""
        named = check_device_map(self.device_map).values() if isinstance(self.device_map, Mapping) else self._devices
        return tuple(dict.fromkeys((self.device, *(device for device in named if is_accelerator(device.type)))))

    def setup_module(self, module: nn.Module, *, is_manual: bool = False) -> None:
        self.precision.convert_module(module)
        self.module = module
        if isinstance(self.device_map, Mapping):
            self.layout = match_device_map(module, check_device_map(self.device_map))
        else:
            rest = {"": self._devices[0]}
            self.layout = {**rest, **deal_parts(module, self._devices, room_on(self._devices, module))}
        keeping_parameters(module, set(self.layout.values()), self._move_all)
        types = {device.type for device in self.layout.values()} - {self.device.type}
        # autocast applies to one type of device: parts on another, such as the CPU, need a context of their own
        other = next((device for device in self.layout.values() if device.type in types), None)
        self._other_context = nullcontext() if other is None else self.precision.forward_context(other)
        self._follow_parts()

    def _move_all(self) -> None:
        for submodule_name, submodule in self.module.named_modules():
            self._move(submodule_name, submodule)

    def _move(self, name: str, submodule: nn.Module) -> None:
        """Move a submodule's own tensors, not those of its children."""
        device = device_of(f"{name}.tensor" if name else "tensor", self.layout)
        assert device is not None
        # a metric of torchmetrics moves as a whole, with its states
        apply_to_own_tensors(submodule, lambda tensor: tensor.to(device))

    def _follow_parts(self) -> None:
        """Register hooks that move a part's inputs to its device, and the children's outputs to the first device."""
        self.close()
        if len(set(self.layout.values()) | {self.device}) == 1:
            return
        for name in filter(None, self.layout):
            part = self.module.get_submodule(name)
            hook = _Follow(self.layout[name])
            self._handles.append(part.register_forward_pre_hook(hook.before, with_kwargs=True))
        back = _Follow(self.device)
        for child in (self.module, *self.module.children()):
            self._handles.append(child.register_forward_hook(back.after))

    def close(self) -> None:
        """Remove the hooks from the module; its parts stay on their devices."""
        while self._handles:
            self._handles.pop().remove()

    def run(self, step_name: str, *args: Any) -> Any:
        with self.forward_context, self._other_context:
            return getattr(self.module, step_name)(*args)


class _Follow:
    """Hooks that move tensors to a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def before(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return self._moved(args), self._moved(kwargs)

    def after(self, _: nn.Module, __: Any, output: Any) -> Any:
        return self._moved(output)

    def _moved(self, data: Any) -> Any:
        non_blocking = can_copy_later(self._device)
        return map_tensors(lambda tensor: tensor.to(self._device, non_blocking=non_blocking), data)
