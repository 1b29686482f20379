"""Building a module without initializing it, and initializing one that was built on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ...common.errors import ModuleError


class EmptyInit(TorchFunctionMode):
    """A block in which the functions of ``torch.nn.init`` do nothing, and draw no random numbers.

    Args:
        enabled: whether it has an effect.
    """

    def __init__(self, enabled: bool = True) -> None:
        super().__init__()
        self.enabled = enabled

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = dict(kwargs or {})
        if self.enabled and getattr(func, "__module__", None) == "torch.nn.init":
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **given)


def materialize_meta_tensors(module: nn.Module, device: torch.device | str | int) -> None:
    """Move the parameters and buffers that are on the meta device to another one, and initialize them there.

    Raises:
        ModuleError: for a submodule that has such tensors but no ``reset_parameters``.
    """
    for each in module.modules():
        if not any(tensor.is_meta for tensor in chain(each.parameters(recurse=False), each.buffers(recurse=False))):
            continue
        reset = getattr(each, "reset_parameters", None)
        if not callable(reset):
            raise ModuleError(
                f"{type(each).__name__} has tensors on the meta device, and found no reset_parameters to initialize "
                "them; define it, or build the module on the device."
            )
        each.to_empty(device=device, recurse=False)
        reset()
