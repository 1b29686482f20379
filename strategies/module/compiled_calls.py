"""Compilation of a module's calls in place, on every supported version of torch."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, Final
from weakref import WeakKeyDictionary

from torch import nn

from ..torch_tensors import call_uncompiled, set_compiled_call

_CALLS: Final[WeakKeyDictionary[type[nn.Module], Callable[..., Any]]] = WeakKeyDictionary()
"""For each class `call_uncompiled` with code of its own, which all compiled modules of the class share."""


def compile_calls(module: nn.Module, compiler: Callable[..., Any]) -> None:
    """Compile a module's calls, keeping its names, as ``module.compile()`` does; `compiler` takes a function.

    torch 2.11 does not compile a ``forward`` of torch's own, such as that of ``nn.TransformerEncoderLayer``, unless
    another function calls it; hence `call_uncompiled`.
    """
    set_compiled_call(module, compiler(MethodType(_call_of(type(module)), module)))


def _call_of(kind: type[nn.Module]) -> Callable[..., Any]:
    """Return what calls a module of a class.

    torch compiles one code so often (``recompile_limit``: 8 times), and then runs it as it is: with one for all classes
    three of them would reach that, trained and evaluated.
    """
    if kind not in _CALLS:
        code = call_uncompiled.__code__.replace(co_name=f"_call_{kind.__name__}")
        _CALLS[kind] = FunctionType(code, call_uncompiled.__globals__)
    return _CALLS[kind]
