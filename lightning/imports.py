"""Imports of a Lightning program: the names that they bind, and the Echelon imports that replace them."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Final

from .names import PUBLIC_AT_ROOT, RENAMED, find_in_fabric, has_counterpart, is_known
from .stand_in import MODULES, ROOTS

ELSEWHERE: Final = "echelon.lightning"
"""The module of names that Echelon itself does not have, and of those that raise when they are used."""

_ROOMS: Final = {"callbacks", "strategies"}
"""Lightning modules that Echelon's root has under the same name."""


@dataclass(frozen=True)
class Bound:
    """What a name in the program refers to: a Lightning module, or a name in one."""

    path: str
    is_module: bool

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]


@dataclass(frozen=True)
class Rewritten:
    """The replacement of an import, what it binds, and what to note about it."""

    text: str
    bound: dict[str, Bound]
    unknown: tuple[str, ...] = ()
    """Unknown names, which stay as they are."""
    source: str | None = None
    """The module that all names come from, if there is only one: then the layout of the line can stay."""


def is_lightning(path: str | None) -> bool:
    """Return whether a module belongs to Lightning."""
    return path is not None and path.partition(".")[0] in ROOTS


def new_name(name: str) -> str:
    """Return Echelon's name of a Lightning class or function."""
    return RENAMED.get(name, name)


def rewrite_import(node: ast.Import) -> Rewritten:
    """Return ``import echelon`` in place of ``import lightning``; the line's other imports stay."""
    texts, bound, has_root = [], {}, False
    for alias in node.names:
        if not is_lightning(alias.name):
            texts.append(ast.unparse(alias))
            continue
        own = alias.asname or alias.name.partition(".")[0]
        bound[own] = Bound(alias.name if alias.asname else own, is_module=True)
        text = f"echelon as {alias.asname}" if alias.asname else "echelon"
        if alias.asname or not has_root:
            texts.append(text)
        has_root = has_root or not alias.asname
    return Rewritten(f"import {', '.join(texts)}", bound)


def rewrite_from(node: ast.ImportFrom, indent: str) -> Rewritten:
    """Return the imports that replace ``from lightning... import ...``: from Echelon, and from `ELSEWHERE`."""
    module = node.module or ""
    groups: dict[str, list[str]] = {}
    bound, unknown = {}, []
    lines = []
    for alias in node.names:
        own, path = alias.asname or alias.name, f"{module}.{alias.name}"
        if alias.name == "*":
            groups.setdefault("echelon", []).append("*")
            bound.update({name: Bound(f"{module}.{name}", is_module=False) for name in RENAMED})
        elif path in MODULES:
            bound[own] = Bound(path, is_module=True)
            in_room = alias.name in _ROOMS
            lines.append(f"from echelon import {ast.unparse(alias)}" if in_room else f"import echelon as {own}")
        elif not is_known(alias.name):
            unknown.append(alias.name)
            groups.setdefault(module, []).append(ast.unparse(alias))
        elif (place := find_in_fabric(module, alias.name)) is not None:
            bound[own] = Bound(path, is_module=False)
            lines.append(f"from {place[0]} import {place[1]} as {own}")
        else:
            bound[own] = Bound(path, is_module=False)
            new = new_name(alias.name)
            source = "echelon" if alias.name in PUBLIC_AT_ROOT and has_counterpart(alias.name) else ELSEWHERE
            shown = new if source == "echelon" else alias.name
            groups.setdefault(source, []).append(f"{shown} as {alias.asname}" if alias.asname else shown)
    only = next(iter(groups)) if len(groups) == 1 and not lines else None
    lines += [f"from {source} import {', '.join(names)}" for source, names in groups.items()]
    return Rewritten(f"\n{indent}".join(lines), bound, tuple(unknown), only)
