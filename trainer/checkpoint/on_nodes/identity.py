"""Hashes of manifests, which are the same on every node that has a part of a checkpoint."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from ..files import HASH_NAME
from ..manifest import MANIFEST, is_checkpoint_file, trailer


def manifest_digest(path: Path) -> str:
    """Return the hash of the manifest of a checkpoint, or of the end of one file; empty if there is none."""
    try:
        if path.is_dir():
            content = (path / MANIFEST).read_bytes()
        elif is_checkpoint_file(path):
            with path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - len(trailer(0))))
                content = file.read()
        else:
            return ""
    except OSError:
        return ""
    return hashlib.new(HASH_NAME, content).hexdigest()


def digests_in(folder: Path) -> dict[str, str]:
    """Return the names of the checkpoints in a folder, each with the hash of its manifest; no links."""
    found = {path.name: manifest_digest(path) for path in sorted(folder.iterdir()) if not path.is_symlink()}
    return {name: digest for name, digest in found.items() if digest and not name.startswith(".")}
