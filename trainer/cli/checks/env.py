"""The command ``echelon env``: versions and hardware, to paste into an issue."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import torch

from ....common.console import say
from ....strategies.cluster.version import VERSION
from ..output import make_printable

_PACKAGES: Final = (
    *("numpy", "safetensors", "tensorboard", "tqdm", "omegaconf", "lightning", "pytorch-lightning", "torchmetrics"),
    *("torchvision", "transformers", "peft", "torchao", "accelerate", "mlflow", "mlflow-skinny", "wandb", "ray"),
)
"""Packages with which a run may work together; those that are not installed are left out."""
_EPILOG: Final = """\
Paste what it prints into an issue, with the program and its whole output. It reads nothing but versions and
devices.

exit codes:
  0 done   2 wrong option
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the form of the output."""
    parser.epilog = _EPILOG
    parser.add_argument("--json", action="store_true", help="print them as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the versions and the hardware; return 0."""
    known = describe_machine()
    if options.json:
        say(json.dumps(known))
    else:
        width = max(map(len, known))
        say(make_printable("\n".join(f"{name:{width}}  {value}" for name, value in known.items())))
    return 0


def describe_machine() -> dict[str, str]:
    """Return what an issue should say of the machine, by name."""
    known = {
        "echelon": VERSION,
        "torch": str(torch.__version__),
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        "processors": f"{os.cpu_count()}, of which torch uses {torch.get_num_threads()}",
        "devices": ", ".join(_list_devices()) or "none beside the CPU",
        "backends": ", ".join(_list_backends()) or "torch.distributed is not built in",
    }
    return known | {package: found for package in _PACKAGES if (found := _version_of(package)) is not None}


def _list_devices() -> list[str]:
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return [] if kind is None else [f"{torch.accelerator.device_count()} x {kind.type}"]


def _list_backends() -> list[str]:
    distributed = torch.distributed
    if not distributed.is_available():
        return []
    return [name for name in distributed.Backend.backend_list if distributed.is_backend_available(name)]


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
