"""Flushing to disk of what was written, so that it is there after a loss of power."""

from __future__ import annotations

import os
from pathlib import Path


def flush_to_disk(path: Path) -> None:
    """Flush a file's content, or a folder's entries."""
    can_open_folders = hasattr(os, "O_DIRECTORY")  # Windows cannot, and flushes only what is open for writing
    if not can_open_folders and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY if can_open_folders else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
