"""PlacedByMap: a module whose parts are on several devices of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from ..devices.moves import keeping_parameters
from ..distributed.nested import can_copy_later, map_tensors
from ..module.device_layout import device_of
from ..torch_internals.modules import apply_to_own_tensors
from .placed import Placed, Site


class PlacedByMap(Placed):
    """A module of which each part is moved to a device; hooks move the inputs of a part there, and the outputs back.

    Args:
        site: where the batches are.
        module: the module, in the dtypes of the precision.
        layout: the device of each part by its name; the innermost name counts, and ``""`` is everything else.
    """

    def __init__(self, site: Site, module: nn.Module, layout: Mapping[str, torch.device]) -> None:
        super().__init__(site, module)
        self._layout = layout
        self._handles: list[Any] = []
        keeping_parameters(module, set(layout.values()), self._move_all)
        types = {device.type for device in layout.values()} - {self.device.type}
        # autocast applies to one type of device: parts on another, such as the CPU, need a context of their own
        other = next((device for device in layout.values() if device.type in types), None)
        self._other_context: AbstractContextManager[object] = (
            nullcontext() if other is None else self.precision.forward_context(other)
        )
        self._follow_parts()

    def _move_all(self) -> None:
        for submodule_name, submodule in self.module.named_modules():
            self._move(submodule_name, submodule)

    def _move(self, name: str, submodule: nn.Module) -> None:
        """Move a submodule's own tensors, not those of its children."""
        device = device_of(f"{name}.tensor" if name else "tensor", self._layout)
        assert device is not None
        # a metric of torchmetrics moves as a whole, with its states
        apply_to_own_tensors(submodule, lambda tensor: tensor.to(device))

    def _follow_parts(self) -> None:
        """Register hooks that move a part's inputs to its device, and the children's outputs to the first device."""
        if len(set(self._layout.values()) | {self.device}) == 1:
            return
        for name in filter(None, self._layout):
            part = self.module.get_submodule(name)
            hook = _Follow(self._layout[name])
            self._handles.append(part.register_forward_pre_hook(hook.before, with_kwargs=True))
        back = _Follow(self.device)
        for child in (self.module, *self.module.children()):
            self._handles.append(child.register_forward_hook(back.after))

    def close(self) -> None:
        """Remove the hooks from the module; its parts stay on their devices."""
        while self._handles:
            self._handles.pop().remove()

    def step_fn(self, step_name: str) -> Callable[..., Any]:
        return partial(self._run, step_name)

    def _run(self, step_name: str, *args: object) -> Any:
        with self.forward_context, self._other_context:
            return getattr(self.module, step_name)(*args)


class _Follow:
    """Hooks that move tensors to a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def before(self, _: nn.Module, args: object, kwargs: object) -> tuple[Any, Any]:
        return self._moved(args), self._moved(kwargs)

    def after(self, _: nn.Module, __: object, output: object) -> object:
        return self._moved(output)

    def _moved(self, data: object) -> object:
        non_blocking = can_copy_later(self._device)
        return map_tensors(lambda tensor: tensor.to(self._device, non_blocking=non_blocking), data)
