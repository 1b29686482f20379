"""Echelon's classes of which Lightning's derive: a config names the latter by their short names alone."""

from __future__ import annotations

from typing import Final

from ...common.internals.config_paths import find_import_paths
from ..extras.utilities import KNOWN_AS

_OWN: Final = "OfEchelon"


def _bases() -> dict[str, type]:
    found = {}
    for kind in KNOWN_AS:
        base = next((base for base in kind.__mro__[1:] if base.__name__ == kind.__name__), None)
        if base is not None:
            found[kind.__name__ + _OWN] = base
    return found


def __getattr__(name: str) -> type:
    bases = _bases()
    if name not in bases:
        raise AttributeError(name)
    return bases[name]


def let_short_names_mean_lightnings() -> None:
    """Tell jsonargparse another path of each of Echelon's classes: two of one name would be ambiguous."""
    paths = find_import_paths()
    if paths is not None:  # some versions have none, and need a class_path
        for name, base in _bases().items():
            paths.add(base, f"{__name__}.{name}")
