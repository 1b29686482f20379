"""Keys of a config: the top-level ones, and the settings of the Trainer, found without importing torch."""

from __future__ import annotations

import ast
import importlib
from dataclasses import fields
from importlib.util import find_spec
from typing import Final

KEYS: Final = (
    "seed",
    "trainer",
    "module",
    "data",
    "optimizer",
    "lr_scheduler",
    "ckpt_path",
    "optimizer_settings",
    "deploy",
)
"""The top-level keys of a config."""

_ROOM: Final = f"{__package__.rpartition('.cli.')[0]}.session"


def setting_names() -> list[str]:
    """Return the names of the Trainer's settings, as the source of `Settings` lists them.

    A shell asks for them whenever it starts, and importing `Settings` takes two seconds.
    """
    name = f"{_ROOM}.settings"
    spec = find_spec(name)
    read = getattr(spec.loader, "get_source", None) if spec is not None else None
    source = read(name) if read is not None else None
    if source is None:  # an installation without source files
        return [field.name for field in fields(importlib.import_module(name).Settings)]
    (settings,) = (
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "Settings"
    )
    lines = [node.target for node in settings.body if isinstance(node, ast.AnnAssign)]
    return [target.id for target in lines if isinstance(target, ast.Name)]
