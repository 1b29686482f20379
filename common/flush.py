"""Flushing to disk of what was written, so that it is there after a loss of power."""

from __future__ import annotations

import os
from pathlib import Path


def flush_to_disk(path: Path) -> None:
    """Flush a file's content, or a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
