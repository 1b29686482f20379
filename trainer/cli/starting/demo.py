"""The command ``echelon demo``: the digits example, which is installed with the package."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any, Final

from ....common.console import say

_EXAMPLE: Final = "examples.digits"
_NEEDED: Final = {"matplotlib": "matplotlib", "sklearn": "scikit-learn", "torchvision": "torchvision"}
"""Packages that the example imports besides torch, and their names for pip."""
_EPILOG: Final = """\
It trains a small CNN on the 1797 handwritten digits that come with scikit-learn, on this machine's GPUs or its CPU, and
writes logs, checkpoints and curves into the working directory. Nothing is downloaded. Where scikit-learn, torchvision
or matplotlib are missing, it tells two spirals apart instead, with what is installed together with Echelon.

examples:
  echelon demo
  echelon demo --strategy ddp --devices 2 --epochs 5

exit codes:
  0 done   1 the run failed   2 wrong option   130 interrupted (Ctrl-C)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the example."""
    parser.add_argument("--strategy", default="auto", metavar="NAME", help="how to use several devices (auto)")
    parser.add_argument("--devices", default="auto", metavar="N", help="the number of devices; by default all")
    parser.add_argument("--epochs", type=_at_least_one, default=20, metavar="N", help="passes over the data (20)")
    parser.epilog = _EPILOG


def run(options: argparse.Namespace) -> int:
    """Train, test, draw the curves, and print where they are; without the example's packages, a smaller program."""
    missing = [package for name, package in _NEEDED.items() if importlib.util.find_spec(name) is None]
    if missing:
        say(
            f"Spirals, since the handwritten digits need {', '.join(missing)}: {sys.executable} -m pip install "
            + " ".join(missing)
        )
    assert __package__ is not None
    # under its full name, the processes of a run can import it, too
    name = f"{__package__}.spirals" if missing else f"{__package__.partition('.')[0]}.{_EXAMPLE}"
    example: Any = importlib.import_module(name)
    trainer = example.train(options.epochs, strategy=options.strategy, devices=options.devices)
    if trainer.is_global_zero:
        say(f"The program:  {Path(example.__file__)}")
    return 0


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number
