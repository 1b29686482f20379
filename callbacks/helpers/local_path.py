"""Local paths: a user's folder or file, with ``~`` expanded; a URL is refused."""

from __future__ import annotations

import re
from pathlib import Path

from ...strategies.errors import ConfigError


def local_path(name: str, path: str | Path) -> Path:
    """Return the local path in the argument called `name`.

    Raises:
        ConfigError: for a URL, which ``pathlib`` would treat as a local folder of that name.
    """
    if re.match(r"[A-Za-z][\w+.-]+:/", str(path)):
        raise ConfigError(
            f"{name} must be a local path, got the URL {str(path)!r}; mount the store as a folder, or write to a local "
            "folder and copy it."
        )
    return Path(path).expanduser()
