"""Compilation of a module's calls in place, on every supported version of torch."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, Final
from weakref import WeakKeyDictionary

from torch import nn

_CALLS: Final[WeakKeyDictionary[type[nn.Module], Callable[..., Any]]] = WeakKeyDictionary()
"""For each class `_call` with code of its own, which all compiled modules of the class share."""


def compile_calls(module: nn.Module, compiler: Callable[..., Any]) -> None:
    """Compile a module's calls, keeping its names, as ``module.compile()`` does; `compiler` takes a function.

    torch 2.11 does not compile a ``forward`` of torch's own, such as that of ``nn.TransformerEncoderLayer``, unless
    another function calls it; hence `_call`.
    """
    module._compiled_call_impl = compiler(MethodType(_call_of(type(module)), module))  # noqa: SLF001


def _call_of(kind: type[nn.Module]) -> Callable[..., Any]:
    """Return what calls a module of a class.

    torch compiles one code so often (``recompile_limit``: 8 times), and then runs it as it is: with one for all classes
    three of them would reach that, trained and evaluated.
    """
    if kind not in _CALLS:
        _CALLS[kind] = FunctionType(_call.__code__.replace(co_name=f"_call_{kind.__name__}"), globals())
    return _CALLS[kind]


def _call(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)  # noqa: SLF001
