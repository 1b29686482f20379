"""Compilation of a module's calls in place, on every supported version of torch."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn


def compile_calls(module: nn.Module, compiler: Callable[..., Any]) -> None:
    """Compile a module's calls, keeping its names, as ``module.compile()`` does; `compiler` takes a function.

    torch 2.11 does not compile a ``forward`` of torch's own, such as that of ``nn.TransformerEncoderLayer``, unless
    another function calls it; hence `_call`.
    """
    module._compiled_call_impl = compiler(MethodType(_call, module))  # noqa: SLF001


def _call(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)  # noqa: SLF001
