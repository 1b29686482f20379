"""Own code: which functions, classes and objects belong to the user, and the names that a function's code uses."""

from __future__ import annotations

import dis
import sys
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Final, NamedTuple

_PACKAGE: Final = __name__.partition(".")[0]
_STANDARD: Final = sysconfig.get_path("stdlib")
_INSTALLED: Final = ("site-packages", "dist-packages")
_HANDLED_ELSEWHERE: Final = frozenset(("torch", _PACKAGE))
"""The packages whose objects the loop keeps or replaces itself: optimizers, loaders, strategies, loggers, callbacks."""
_WITH_THREADS: Final = frozenset(("threading", "multiprocessing", "concurrent", "asyncio", "logging", "socket", "io"))
_RECORDERS: Final = frozenset(("wandb", "mlflow", "comet_ml", "neptune", "clearml", "aim", "tensorboardX"))
"""Packages that send what they have recorded, from threads of their own."""
_PLAIN_OBJECTS: Final = frozenset(("SimpleNamespace", "UserDict", "UserList", "ChainMap"))
"""The classes of Python's library whose objects only hold others."""


class Names(NamedTuple):
    """The names in the code of a function, and of functions inside it."""

    used: frozenset[str]
    assigned: frozenset[str]
    """Those that it declares global and assigns."""


@lru_cache(maxsize=4096)
def names_in(code: CodeType) -> Names:
    """Return the names that code uses as globals or attributes."""
    codes = list(_with_inner(code))
    used = frozenset(name for each in codes for name in each.co_names)
    stores = (step.argval for each in codes for step in dis.get_instructions(each) if step.opname == "STORE_GLOBAL")
    return Names(used, frozenset(stores))


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def is_own_code(module_name: object) -> bool:
    """Return whether code of a module of this name is the user's, not that of an installed package."""
    return isinstance(module_name, str) and _kind_of(module_name.partition(".")[0]) == "own"


def is_own_object(kind: type) -> bool:
    """Return whether the attributes of a class's objects are the user's, as those of most packages are."""
    roots = [str(getattr(each, "__module__", "")).partition(".")[0] for each in kind.__mro__[:-1]]
    if not roots or any(root in _HANDLED_ELSEWHERE | _WITH_THREADS | _RECORDERS for root in roots):
        return False
    return _kind_of(roots[0]) != "standard" or kind.__name__ in _PLAIN_OBJECTS


@lru_cache(maxsize=4096)
def _kind_of(root: str) -> str:
    """Return whether a package is "own", "installed" or "standard"."""
    if root in _HANDLED_ELSEWHERE or root == "builtins":
        return "standard"
    file = getattr(sys.modules.get(root), "__file__", None)
    if file is None:  # also of a class that was sent to this process, whose module is not there
        return "standard" if root in sys.stdlib_module_names else "own"
    if any(part in _INSTALLED for part in Path(file).parts):
        return "installed"
    return "standard" if Path(file).is_relative_to(_STANDARD) else "own"
