"""Private names of torch.compile, and settings of torch that its workers take over: read, and set where they differ."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import torch

from ...common.lazy_names import is_imported
from .versions import names_of_torch

if TYPE_CHECKING:
    from torch._dynamo.callback import CompilationCallbackHandler

COMPILER_MODULE: Final = "torch._dynamo"
"""The module that the first call of ``torch.compile`` imports, and the first optimizer; it takes a second."""

_PRECISION_OF: Final = (
    ("generic", ("all",)),
    ("cuda", ("all", "matmul", "conv", "rnn")),
    ("mkldnn", ("all", "matmul", "conv", "rnn")),
)
_COMPILER: Final = ("torch._dynamo.config", "torch._inductor.config")


def has_compiled() -> bool:
    """Return whether ``torch.compile`` has compiled anything in this process (`torch._dynamo.utils.counters`).

    Seen in torch 2.11 to 2.15.
    """
    module: Any = sys.modules.get("torch._dynamo.utils")
    return module is not None and bool(module.counters["frames"])


def find_compilation_callbacks() -> CompilationCallbackHandler:
    """Return the registry of functions that torch.compile calls before and after it compiles (torch 2.11 to 2.15)."""
    with names_of_torch:
        from torch._dynamo.callback import callback_handler
    return callback_handler


def read_compiler_settings() -> dict[tuple[str, str], object]:
    """Return the torch.compile settings that the program has changed, by module and name; plain values only.

    Seen in torch 2.11 to 2.15.
    """
    changed = {}
    for name in _COMPILER:
        config: Any = sys.modules.get(name)  # importing it takes a second, and if not imported, it is unchanged
        for key in _changed(config) if config is not None else ():
            if _is_plain(value := getattr(config, key)):
                changed[name, key] = value
    return changed


def read_float32_precisions() -> dict[tuple[str, str], str]:
    """Return the precision of float32 computation, by backend and operation (torch >= 2.9)."""
    return {(backend, op): _precision("get")(backend, op) for backend, ops in _PRECISION_OF for op in ops}


def set_float32_precisions(precisions: dict[tuple[str, str], str]) -> None:
    """Set only the precisions that differ; the others stay at their defaults (torch 2.11 to 2.15)."""
    for place, precision in precisions.items():
        if _precision("get")(*place) != precision:
            _precision("set")(*place, precision)


def is_compiler_imported() -> bool:
    """Return whether the module of ``torch.compile`` was imported already (`COMPILER_MODULE`; torch 2.11 to 2.15)."""
    return is_imported(COMPILER_MODULE)


def _precision(verb: str) -> Callable[..., str]:
    with names_of_torch:
        function: Callable[..., str] = getattr(torch._C, f"_{verb}_fp32_precision_{verb}ter")  # noqa: SLF001
    return function


def _changed(config: Any) -> Iterable[str]:
    with names_of_torch:
        return [key for key in config._config if not config._is_default(key)]  # noqa: SLF001


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    return value is None or isinstance(value, bool | int | float | str)
