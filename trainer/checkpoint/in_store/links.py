"""Links to checkpoints: those of the file system, and in a store small objects that name another checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

from ....common.storage import AnyPath, StorePath

_FORMAT: Final = "echelon-link"
_LONGEST: Final = 4096


def link_target(path: AnyPath) -> AnyPath | None:
    """Return what a link such as ``last.ckpt`` points to, whether or not that is there; None if it is no link."""
    if not isinstance(path, StorePath):
        # not Path.is_symlink(), which raises errors of the disk
        return Path(os.path.realpath(path)) if os.path.islink(path) else None
    size = path.store.size(path)
    if size is None or size > _LONGEST:
        return None
    try:
        content = json.loads(path.read_bytes())
        target = content["target"] if content["format"] == _FORMAT else None
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
    is_name = isinstance(target, str) and target and ".." not in target.split("/")
    return path.parent / target if is_name and isinstance(target, str) else None


def follow_link(path: StorePath) -> StorePath:
    """Return the checkpoint at a path, or the one that a link there points to."""
    target = link_target(path)
    return target if isinstance(target, StorePath) else path


def write_link(link: StorePath, path: StorePath) -> None:
    """Make an object point to a checkpoint in its folder or below; an older one is replaced in one step.

    Raises:
        ValueError: if the checkpoint is elsewhere.
    """
    target = str(path.relative_to(link.parent))
    link.write_bytes(json.dumps({"format": _FORMAT, "target": target}).encode())
