"""Compilation of a module's calls in place, on every supported version of torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, Final
from weakref import WeakKeyDictionary

from torch import nn

from ..torch_internals.modules import call_uncompiled, find_compiled_call, set_compiled_call

_CALLS: Final[WeakKeyDictionary[type[nn.Module], Callable[..., object]]] = WeakKeyDictionary()
"""For each class `call_uncompiled` with code of its own, which all compiled modules of the class share."""


def compile_calls(module: nn.Module, compiler: Callable[..., Any]) -> None:
    """Compile a module's calls, keeping its names, as ``module.compile()`` does; `compiler` takes a function.

    torch 2.11 does not compile a ``forward`` of torch's own, such as that of ``nn.TransformerEncoderLayer``, unless
    another function calls it; hence `call_uncompiled`.
    """
    set_compiled_call(module, _FirstCall(module, compiler(MethodType(_call_of(type(module)), module))))


class _FirstCall:
    """The first call of a compiled module: later ones are the compiled function, without a detour."""

    def __init__(self, module: nn.Module, compiled: Callable[..., object]) -> None:
        self.module, self.compiled = module, compiled

    def __call__(self, *args: object, **kwargs: object) -> object:
        set_compiled_call(self.module, self.compiled)
        return self.compiled(*args, **kwargs)


def warn_if_uncalled(module: nn.Module) -> None:
    """Warn if none of the modules that were compiled has been called: nothing runs compiled."""
    calls = {name: call for name, part in module.named_modules() if (call := find_compiled_call(part)) is not None}
    if calls and all(isinstance(call, _FirstCall) for call in calls.values()):
        own = type(module).__name__
        compiled = f"{own}.forward" if "" in calls else f"{', '.join(list(calls)[:3])} of {own}"
        warnings.warn(
            f"compile=True has compiled nothing that training_step calls: it compiles {compiled}, which the first step "
            "did not call. Call self(...) in training_step, or leave compile out and compile what it calls in "
            "configure_model, such as self.net.compile().",
            stacklevel=2,
        )


def _call_of(kind: type[nn.Module]) -> Callable[..., object]:
    """Return what calls a module of a class.

    torch compiles one code so often (``recompile_limit``: 8 times), and then runs it as it is: with one for all classes
    three of them would reach that, trained and evaluated.
    """
    if kind not in _CALLS:
        code = call_uncompiled.__code__.replace(co_name=f"_call_{kind.__name__}")
        _CALLS[kind] = FunctionType(code, call_uncompiled.__globals__)
    return _CALLS[kind]
