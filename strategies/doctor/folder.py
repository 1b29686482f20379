"""Checks of the folder of a run: what checkpoints need from a file system, and whether its clock agrees."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from .finding import Finding

_LEAST_SPACE: Final = 1 << 30
_SKEW: Final = 2.0
_FIRST_YEAR: Final = 2024
"""A clock that shows an earlier year is wrong."""


def check_folder(folder: Path) -> Iterator[Finding]:
    """Check that checkpoints can be written into a folder: created, synchronized, renamed, linked, removed."""
    try:
        with _removing_made_folders(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".echelon-doctor-", dir=folder) as inside:
                yield from _try_saving(folder, Path(inside))
            free = shutil.disk_usage(folder).free
    except OSError as error:
        is_file = isinstance(error, FileExistsError | NotADirectoryError)
        yield Finding(
            "run folder",
            f"{folder} cannot be written ({error.strerror or error})",
            f"{'give the path of a folder' if is_file else 'make it writable, such as mount -o remount,rw'}; or give "
            "another folder to --folder and default_root_dir",
        )
        return
    if free < _LEAST_SPACE:
        yield Finding(
            "run folder",
            f"{folder} has {free >> 20} MiB left; checkpoints will not fit",
            "free some space, or use another file system",
            stops=free < _LEAST_SPACE >> 4,
        )


def _try_saving(folder: Path, inside: Path) -> Iterator[Finding]:
    """Try in a folder what saving a checkpoint does."""
    step = "fsync"
    try:
        old, new = inside / "old", inside / "new"
        old.mkdir()
        with (old / "file").open("wb") as file:
            file.write(b"echelon")
            file.flush()
            os.fsync(file.fileno())
        written = (old / "file").stat().st_mtime
        now = time.time()
        step = "renaming a folder"
        old.rename(new)
        step = "symbolic links"
        (inside / "link").symlink_to("new")
        os.replace(inside / "link", inside / "last")
    except OSError as error:
        yield Finding(
            "run folder",
            f"{folder} does not support {step} ({error.strerror or error}), which checkpoints need to be atomic",
            "use a local or network file system with POSIX semantics, not a mounted object store",
        )
        return
    if abs(now - written) > _SKEW:
        yield Finding(
            "clock",
            f"this machine's clock is {now - written:+.1f} s off the clock of the file system of {folder}: the newest "
            "checkpoint may not be recognized as the newest",
            "timedatectl set-ntp true, or chronyc makestep, on this machine and on the file server",
            stops=False,
        )


def check_clock() -> Iterator[Finding]:
    """Check that the clock is plausible."""
    year = time.gmtime().tm_year
    if year < _FIRST_YEAR:
        yield Finding("clock", f"this machine's clock shows the year {year}", "timedatectl set-ntp true")


@contextlib.contextmanager
def marking_folder(folder: Path, name: str) -> Iterator[None]:
    """Keep a file in a folder, inside the block, by which other nodes see that they share the folder."""
    with _removing_made_folders(folder):
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(name)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                (folder / name).unlink()


@contextlib.contextmanager
def _removing_made_folders(folder: Path) -> Iterator[None]:
    """Remove at the end of the block what did not exist of a folder's path: the run makes it itself."""
    made = [one for one in (folder, *folder.parents) if not os.path.lexists(one)]
    try:
        yield
    finally:
        for one in made:
            with contextlib.suppress(OSError):
                one.rmdir()
