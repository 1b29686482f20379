"""Import of Lightning itself where Python finds this folder by that name: in the root of a checkout."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec
from pathlib import Path
from typing import Final

NAMESAKE: Final = "lightning"


def import_namesake() -> None:
    """Put Lightning into the place of this folder's module, while that is being imported as ``lightning``.

    Raises:
        ModuleNotFoundError: if Lightning is not installed, as without this folder.
    """
    del sys.modules[__name__]  # no module of Lightning's
    here = Path(__file__).resolve().parents[1]
    others = [entry for entry in sys.path if Path(entry).resolve() != here]
    specs = (finder.find_spec(NAMESAKE, others) for finder in sys.meta_path)
    spec = next((spec for spec in specs if spec is not None and spec.origin is not None), None)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {NAMESAKE!r}", name=NAMESAKE)
    sys.modules[NAMESAKE] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
