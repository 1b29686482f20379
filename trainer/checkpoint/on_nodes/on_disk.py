"""Disks of nodes: the hash of the manifest of a checkpoint, the same on each, and which files are on others."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from ....common.errors import CheckpointError
from ....common.storage import AnyPath, StorePath
from ..files import HASH_NAME
from ..manifest import MANIFEST, Manifest, is_checkpoint_file, make_trailer, read_manifest
from .parts import NodePart, files_elsewhere


def manifest_digest(path: Path) -> str:
    """Return the hash of the manifest of a checkpoint, or of the end of one file; empty if there is none."""
    try:
        if path.is_dir():
            content = (path / MANIFEST).read_bytes()
        elif is_checkpoint_file(path):
            with path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - len(make_trailer(0))))
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


def files_on_other_nodes(
    path: AnyPath, manifest: Manifest | None, endings: Sequence[str] = ("",)
) -> dict[str, NodePart]:
    """Return the files of a checkpoint that are on the disks of other nodes, each with the part of its node.

    Args:
        path: the folder.
        manifest: its manifest.
        endings: what the name of a file that is here may end with.
    """
    if manifest is None or not manifest.nodes or isinstance(path, StorePath):
        return {}
    return files_elsewhere(manifest.nodes, lambda name: any((path / f"{name}{ending}").exists() for ending in endings))


def is_part(path: AnyPath) -> bool:
    """Return whether a folder has only the part of some nodes."""
    try:
        return bool(files_on_other_nodes(path, read_manifest(path)))
    except CheckpointError:
        return False
