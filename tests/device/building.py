"""Building of the simulated accelerator, once for its sources and this torch, into the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch

_FOLDER = Path(__file__).parent
SOURCES = sorted((_FOLDER / "csrc").glob("*"))
_NAME = "simulated_device_library"
_ENTRY_POINT = """Metadata-Version: 2.1
Name: simulated-device
Version: 1.0
"""


def missing_tool() -> str | None:
    """Return what this machine lacks to build it; None if it can."""
    compiler = os.environ.get("CXX", "c++")
    return next((tool for tool in (compiler, "ninja") if shutil.which(tool) is None), None)


def build() -> Path:
    """Return the folder of the library, which is built if it is not there: in half a minute of two cores."""
    digest = hashlib.sha256(f"{torch.__version__} {sys.version}".encode())
    for source in SOURCES:
        digest.update(source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "echelon-tests"
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError:  # a home that cannot be written
        cache = Path(tempfile.gettempdir()) / f"echelon-tests-{os.getuid()}"
        cache.mkdir(exist_ok=True)
    folder = cache / f"device-{digest.hexdigest()[:16]}"
    with (cache / "lock").open("w") as lock:  # of several sessions, or workers of one
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            for old in cache.glob("device-*"):
                shutil.rmtree(old)
            _build_into(folder)
            (folder / "complete").touch()
    return folder


def library_in(folder: Path) -> Path:
    """Return the library in a folder that `build` returned."""
    return folder / f"{_NAME}.so"


def _build_into(folder: Path) -> None:
    from torch.utils import cpp_extension

    folder.mkdir()
    cpp_extension.load(
        _NAME,
        [str(source) for source in SOURCES if source.suffix == ".cpp"],
        build_directory=str(folder),
        extra_cflags=["-O0", "-g0"],
        is_python_module=False,
    )
    entry = folder / "site" / "simulated_device-1.0.dist-info"
    entry.mkdir(parents=True)
    (entry / "METADATA").write_text(_ENTRY_POINT)
    (entry / "entry_points.txt").write_text("[torch.backends]\nsimulated = simulated_device:register\n")
