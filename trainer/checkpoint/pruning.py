"""Pruning: a checkpoint is deleted only while a newer one stands."""

from __future__ import annotations

import logging
from pathlib import Path

from ...strategies.errors import CheckpointError
from .atomic_folder import discard
from .finding import Found, list_checkpoints

_logger = logging.getLogger("echelon")


def remove(path: str | Path) -> bool:
    """Delete a checkpoint and return True; the newest valid one of its folder is left alone.

    Whether a newer one is valid is told by the presence and the size of its files: reading all bytes of all would take
    too long at every save.

    Raises:
        CheckpointError: if `path` is no checkpoint folder, or cannot be deleted.
    """
    path = Path(path).absolute()
    found = list_checkpoints(path.parent)
    places = [place for place, checkpoint in enumerate(found) if checkpoint.path == path]
    if not places:
        raise CheckpointError(f"{path} is not a checkpoint folder and is left alone; delete it by hand.")
    is_newest = not any(_stands(newer) for newer in found[places[0] + 1 :])
    if is_newest and _stands(found[places[0]]):
        _logger.warning("%s is the newest valid checkpoint of its folder, so it is not deleted.", path)
        return False
    discard(path)
    return True


def _stands(checkpoint: Found) -> bool:
    if checkpoint.manifest is None:
        return False
    try:
        return all(
            (checkpoint.path / name).stat().st_size == file.size for name, file in checkpoint.manifest.files.items()
        )
    except OSError:
        return False
