"""Skeleton of a module: its structure before it is cut, to run once with gathered weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

from torch import Tensor, nn

from ....common.errors import ModuleError
from ...distributed.nested import map_tensors
from ...state.dtensor import plain_kind
from ...torch_internals.modules import drop_compiled_call, find_buffer_dict, find_parameter_dict

M = TypeVar("M", bound=nn.Module)


class Skeleton:
    """A copy of a module and its submodules, in eval mode, whose parameters are on the meta device.

    Other attributes are shared with the module; those that it exchanges until a run, such as the switch that turns
    adapters off, are taken over then.
    """

    def __init__(self, module: nn.Module) -> None:
        self._copies: dict[nn.Module, nn.Module] = {}
        self._module = self._copy(module)

    def run(self, module: nn.Module, whole: Callable[[Tensor], Tensor], *args: object, **kwargs: object) -> Any:
        """Run the copy's forward with ``whole(parameter)`` for each parameter of the module now, and copies of buffers.

        Hooks of the module itself do not run, as around its own forward.

        Raises:
            ModuleError: if the module has exchanged its submodules since.
        """
        known = dict(self._module.named_modules())
        memory: dict[int, Tensor] = {}

        def filled(tensor: Tensor | None, make: Callable[[Tensor], Tensor]) -> Any:
            return None if tensor is None else memory.setdefault(id(tensor), make(tensor))

        for name, submodule in module.named_modules():
            mine = known.get(name)
            if mine is None:
                raise ModuleError(
                    f"{plain_kind(module).__name__} exchanges its submodules while it runs ({name}, a "
                    f"{type(submodule).__name__}, was not there when it was cut), so its layers cannot be cut; build "
                    "it as it runs (a BigBird with attention_type='original_full'), or leave its layers out of tp_plan."
                )
            mine.__dict__.update(_find_switches(submodule))
            find_parameter_dict(mine).update(
                {key: filled(p, whole) for key, p in find_parameter_dict(submodule).items()}
            )
            find_buffer_dict(mine).update(
                {key: filled(b, _clone_detached) for key, b in find_buffer_dict(submodule).items()}
            )
        return self._module.forward(*args, **kwargs)

    def release(self) -> None:
        """Drop the tensors of the copy, whose modules may refer to each other and so live until garbage is collected.

        Not before its gradients are computed: activation checkpointing runs it again.
        """
        for own in self._copies.values():
            find_parameter_dict(own).clear()
            find_buffer_dict(own).clear()

    def _copy(self, module: M) -> M:
        if module in self._copies:
            return self._copies[module]  # type: ignore[return-value]
        own: M = object.__new__(type(module))
        self._copies[module] = own
        attributes = dict(vars(module))
        forward = attributes.get("forward")
        if isinstance(forward, MethodType) and forward.__self__ is module:
            attributes["forward"] = MethodType(forward.__func__, own)
        parameters, submodules = attributes["_parameters"], attributes["_modules"]
        # detached: the graph of a copy would keep the whole parameters in memory
        attributes["_parameters"] = {
            name: None if p is None else p.detach().to("meta") for name, p in parameters.items()
        }
        # hooks that are registered later, such as those of fully_shard, must not apply to the copy
        containers = [
            name for name in attributes if name == "_buffers" or name.endswith(("_hooks", "_hooks_with_kwargs"))
        ]
        attributes |= {name: copy.copy(attributes[name]) for name in containers}
        attributes["_modules"] = {name: None if m is None else self._copy(m) for name, m in submodules.items()}
        attributes["training"] = False
        vars(own).update(attributes)
        drop_compiled_call(own)  # it calls the module itself
        return own


def _find_switches(module: nn.Module) -> dict[str, object]:
    """Return the flags and names that code assigns to switch a module; not numbers, some of which the cut divides."""
    values = vars(module).items()
    return {name: value for name, value in values if name != "training" and isinstance(value, bool | str | list)}


def copy_detached(values: object) -> Any:
    """Return a copy of a block's inputs, detached from the graph; a tensor that occurs twice is copied once.

    Objects among them, such as key-value caches, are copied with their contents.
    """
    return _copy_once(values, {})


def _copy_once(values: object, copies: dict[int, Any]) -> object:
    def tensor(value: Tensor) -> Tensor:
        if id(value) not in copies:
            copies[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)
        return copies[id(value)]  # type: ignore[no-any-return]

    def other(value: Any) -> object:
        if isinstance(value, nn.Module | type) or not hasattr(value, "__dict__") or callable(value):
            return value
        if id(value) not in copies:
            copies[id(value)] = own = copy.copy(value)
            for name, attribute in vars(value).items():
                vars(own)[name] = _copy_once(attribute, copies)
        return copies[id(value)]

    return map_tensors(tensor, values, other)


def _clone_detached(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
