"""Lazy names: what a package exports, imported from its modules when it is first asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from types import ModuleType


def lazy_names(
    package: str, names: Mapping[str, Sequence[str]], here: Sequence[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package whose names are imported when they are used.

    A program that needs a part of the package, such as a command that lists checkpoints, does not import the rest.
    Modules of the package are its attributes as well, as after an import of everything.

    Args:
        package: The ``__name__`` of the package.
        names: For each module, relative to the package, the names that it defines; for "", the modules that are public.
        here: Other public names, which the package defines itself.
    """
    where = {name: module for module, group in names.items() for name in group}
    known = sys.modules[package]

    def find(name: str) -> object:
        if where.get(name):
            value = getattr(importlib.import_module(f".{where[name]}", package), name)
        elif name.startswith("_") or not _is_module(f"{package}.{name}"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=known)
        else:
            value = importlib.import_module(f".{name}", package)
        return vars(known).setdefault(name, value)

    def listed() -> list[str]:
        own = {name for name, value in vars(known).items() if name.startswith("__") or isinstance(value, ModuleType)}
        return sorted({*own, *where, *here} - {"__getattr__", "__dir__"})

    return find, listed, sorted([*where, *here])


def is_imported(name: str) -> bool:
    """Return whether a module was imported; if not, there are no objects of its classes, and nothing to ask of them."""
    return name in sys.modules


def _is_module(name: str) -> bool:
    """Return whether there is a module of this name; a folder without ``__init__.py``, as of a checkout, is none."""
    spec = find_spec(name)
    return spec is not None and spec.origin is not None
