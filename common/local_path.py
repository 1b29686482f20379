"""Local paths: a user's folder or file, with ``~`` expanded; a URL is refused."""

from __future__ import annotations

import os
import re
from pathlib import Path

from .errors import ConfigError


def local_path(name: str, path: str | Path) -> Path:
    """Return the local path in the argument called `name`.

    Raises:
        ConfigError: for a URL, which ``pathlib`` would treat as a local folder of that name, for a local path that a
            URL was joined to, and for letters that the locale of this process cannot name a file with.
    """
    if re.match(r"[A-Za-z][\w+.-]+:/", str(path)):
        raise ConfigError(
            f"{name} must be a local path, got the URL {str(path)!r}; mount the store as a folder, or write to a local "
            "folder and copy it."
        )
    inside = re.search(r"[\\/]((?:s3a?|gcs|gs|az|abfss?|hdfs|https?|memory|file)):[\\/]+(.*)", str(path))
    if inside is not None:
        raise ConfigError(
            f"{name}={str(path)!r} has a URL inside a local path (os.path.abspath and os.path.join do that to one); "
            f"give {inside[1]}://{inside[2]} alone, or a local path."
        )
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{name}={str(path)!a} has letters that the locale of this process, with {error.encoding} names of "
            "files, lacks; set LC_ALL=C.UTF-8 or PYTHONUTF8=1, or choose another name."
        ) from None
    return Path(path).expanduser()
