"""The frameworks that a program is run with: Echelon, and Lightning if it is installed."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import beside
import pytest
import torch

from echelon.lightning.stand_in import LightningNames
from echelon.strategies.launch.worker import IMPORTED_FIRST


@pytest.fixture(params=["echelon", "lightning"])
def framework(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The names of a framework, in a working directory of the program's own."""
    frameworks = beside.frameworks()
    if request.param not in frameworks:
        pytest.skip("Lightning is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "disabled", True)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what each has to say
        yield frameworks[request.param]


@pytest.fixture(autouse=True)
def _stands_in_no_longer() -> Iterator[None]:
    """Undo that Echelon stands in for Lightning, which a LightningCLI makes it do: later tests look for Lightning.

    Finders of others stay: without that of importlib_metadata, which mlflow imports, no package has a version any more.
    """
    before, imported_first = list(sys.meta_path), list(IMPORTED_FIRST)
    yield
    IMPORTED_FIRST[:] = imported_first
    ours = LightningNames.__module__
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder in before or type(finder).__module__ != ours]
    for name in [name for name, module in sys.modules.items() if isinstance(module, LightningNames)]:
        del sys.modules[name]
