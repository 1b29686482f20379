"""Import of Lightning itself when Python finds this folder under that name, as in the root of a checkout."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec
from pathlib import Path
from typing import Final

NAMESAKE: Final = "lightning"


def import_namesake() -> None:
    """Replace this folder's module with Lightning, while it is being imported as ``lightning``.

    Raises:
        ModuleNotFoundError: if Lightning is not installed, as would happen without this folder.
    """
    del sys.modules[__name__]  # not a Lightning module
    here = Path(__file__).resolve().parents[1]
    others = [entry for entry in sys.path if Path(entry).resolve() != here]
    specs = (finder.find_spec(NAMESAKE, others) for finder in sys.meta_path)
    spec = next((spec for spec in specs if spec is not None and spec.origin is not None), None)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {NAMESAKE!r}", name=NAMESAKE)
    sys.modules[NAMESAKE] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
