"""Spool folders: local folders for files that grow, such as logs, of a run whose folder is in a store."""

from __future__ import annotations

import getpass
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Final

from ..errors import ConfigError
from .paths import AnyPath, StorePath, as_path

_HOME: Final = ".url"
"""The file in a spool folder that has the URL."""


def spool_folder(url: StorePath) -> Path:
    """Return the local folder in which a run writes what belongs at a URL; it is made if it is missing.

    It is the same for all processes of a user on a machine, below the temporary folder (``TMPDIR``).

    Raises:
        ConfigError: if it cannot be made.
    """
    try:
        folder = spool_base() / f"{hashlib.sha256(str(url).encode()).hexdigest()[:16]}"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        note = folder / _HOME
        if _read_note(note) != str(url):  # absent, or left empty by a full disk
            note.write_text(str(url), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{url} needs a local folder for files that grow, such as logs, and none can be written below the "
            f"temporary folder ({error}); set TMPDIR to a folder with some room that may be written."
        ) from error
    return folder


def spool_base() -> Path:
    """Return the folder of all spool folders of this user on this machine, which may not exist yet."""
    return Path(tempfile.gettempdir()) / f"echelon-spool-{_user_id()}"


def home_of(path: str | AnyPath) -> AnyPath:
    """Return the URL of a local path that is in a spool folder; any other path, and a URL, as it is."""
    local = as_path(path)
    if isinstance(local, StorePath):
        return local
    for folder in (local, *local.parents):
        url = _read_note(folder / _HOME)
        if not url:
            continue
        home = as_path(url)
        return home / local.relative_to(folder).as_posix() if isinstance(home, StorePath) else local
    return local


def _read_note(note: Path) -> str:
    try:
        return note.read_text(encoding="utf-8")
    except OSError:
        return ""


def _user_id() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else getpass.getuser()
