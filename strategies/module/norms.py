"""Norms that take inputs of another dtype than their parameters, as they do on GPUs."""

from __future__ import annotations

from typing import Any, Final

from torch import nn

_NORMS: Final = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def match_inputs_of_norms(module: nn.Module) -> None:
    """Let norms take inputs of another dtype than their parameters, which works on GPUs but not on the CPU."""
    for submodule in module.modules():
        if isinstance(submodule, _NORMS) and submodule.weight is not None:
            submodule.register_forward_pre_hook(_match_input)


def _match_input(norm: nn.Module, args: tuple[Any, ...]) -> tuple[object, ...] | None:
    dtype = norm.weight.dtype
    return (args[0].to(dtype), *args[1:]) if args and args[0].dtype != dtype else None
