"""Functions of torch that a ``TorchFunctionMode`` would not see: they are made to ask for one."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, Final

from torch.overrides import handle_torch_function, has_torch_function

_NAMES: Final = (
    ("torch.nn.attention.flex_attention", "flex_attention"),
    ("torch.nn.attention.varlen", "varlen_attn"),
    ("torch.nn.attention.varlen", "varlen_attn_out"),
)
AS_IT_WAS: Final = "_echelon_as_it_was"
"""The attribute of a function that asks for a mode, which holds the one that does not."""


def make_attention_overridable() -> None:
    """Let attention that is written in Python ask for a ``TorchFunctionMode``, as other functions of torch do.

    Programs hold the functions themselves (``from ... import flex_attention``), so they get another body in place.
    Modules of torch that nobody has imported are left alone.
    """
    for module, name in _NAMES:
        function = getattr(sys.modules.get(module), name, None)
        if isinstance(function, FunctionType) and not hasattr(function, AS_IT_WAS) and function.__closure__ is None:
            _make_overridable(function)


def as_it_was(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that asks for no mode."""
    plain: Callable[..., object] = getattr(function, AS_IT_WAS)
    return plain


def _make_overridable(function: FunctionType) -> None:
    plain = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    plain.__kwdefaults__ = function.__kwdefaults__
    signature = inspect.signature(function)

    def call(*args: object, **kwargs: object) -> object:
        if has_torch_function(args):
            return handle_torch_function(function, args, *args, **kwargs)
        return plain(*args, **kwargs)

    # a body reads the names of its own module
    key = f"_echelon_{function.__name__}"
    function.__globals__[key] = call
    names: dict[str, Any] = {}
    exec(f"def body(*args, **kwargs):\n    return {key}(*args, **kwargs)", names)  # noqa: S102 - of these names only
    function.__code__, function.__defaults__ = names["body"].__code__, None
    function.__kwdefaults__ = None
    vars(function).update({AS_IT_WAS: plain, "__signature__": signature})
