"""Compile the calls of a module in place, on each version of torch."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn


def compile_calls(module: nn.Module, compiler: Callable[..., Any]) -> None:
    """Compile the calls of a module, whose names stay, as ``module.compile()`` does; `compiler` takes a function.

    torch 2.11 compiles nothing where ``forward`` is torch's own, as that of ``nn.TransformerEncoderLayer``, unless
    another function calls it; so there is one.
    """
    module._compiled_call_impl = compiler(MethodType(_call, module))  # noqa: SLF001


def _call(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)  # noqa: SLF001
