"""Copies of folders of a store that all processes of a node read: brought once, and again only if they have changed."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ..errors import ConfigError
from .local_copy import local_folder
from .paths import StorePath
from .spool import spool_base

_COPIES: Final = "copies"


def node_copy(path: StorePath) -> Path:
    """Return a copy of a folder of objects below the temporary folder (``TMPDIR``), where it stays for later runs.

    The first process that asks brings it, others wait. If an object has changed since, all are brought again, and the
    older copy is deleted. From a store that tells no versions of its objects, each process brings its own.

    Raises:
        ConfigError: if there is no room for it, or it cannot be written.
        FileNotFoundError: if there is nothing.
        StoreError: if the store does not answer.
    """
    versions = path.store.versions(path)
    if not versions:
        raise FileNotFoundError(f"{path} does not exist")
    if not all(versions.values()):
        return local_folder(path)
    digest = hashlib.sha256(repr(sorted(versions.items())).encode()).hexdigest()[:16]
    try:
        folder = spool_base() / _COPIES / hashlib.sha256(str(path).encode()).hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _one_at_a_time(folder):
            if not (folder / digest).is_dir():
                for older in folder.iterdir():
                    shutil.rmtree(older, ignore_errors=True)
                new = folder / f".{digest}"
                for one, size in path.find().items():
                    path.store.copy_to(one, new / one.relative_to(path), size)
                os.replace(new, folder / digest)
    except OSError as error:
        raise ConfigError(
            f"{path} is copied below the temporary folder before it is read, and that failed ({error}); set TMPDIR to "
            "a folder with room for it."
        ) from error
    return folder / digest


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Let one process of this machine at a time into the block; where there is no flock, as on Windows, all."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with folder.with_suffix(".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
