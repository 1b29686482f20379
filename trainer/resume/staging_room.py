"""Room for staging: a checkpoint in one file lies on the local disk before it is sent to a store."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from typing import Protocol, cast

from ...callbacks.model_checkpoint import ModelCheckpoint
from ...common.errors import ConfigError
from ...common.storage import is_url
from ...common.units import in_units
from ...strategies.distributed.nested import iterate_tensors
from ..session.session import Session


class SavesFiles(Protocol):
    """The trainer, as far as it says in which form it saves."""

    @property
    def saves_single_files(self) -> bool:
        """Whether a checkpoint is one file if `save_checkpoint` is not told otherwise."""


def saves_single_files(session: Session) -> bool:
    """Return whether a run saves checkpoints as single files, if not told otherwise."""
    return cast(SavesFiles, session.run).saves_single_files or bool(_savers_of_files(session))


def _savers_of_files(session: Session) -> list[ModelCheckpoint]:
    default = cast(SavesFiles, session.run).saves_single_files
    savers = [one for one in session.callbacks if isinstance(one, ModelCheckpoint)]
    return [one for one in savers if (default if one.single_file is None else one.single_file)]


def check_room(session: Session, parts: Mapping[str, object]) -> None:
    """Check that the temporary folder has room for the tensors of a state, where a run stages it there.

    Raises:
        ConfigError: on the first rank, which writes the file, if it has not.
    """
    if session.strategy.rank != 0 or not any(is_url(one.dirpath) for one in _savers_of_files(session)):
        return
    try:
        folder = tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise ConfigError(
            f"A checkpoint in one file is staged in the temporary folder, and there is none ({error}); set TMPDIR to "
            "a folder that can be written, or use single_file=False."
        ) from error
    needed = sum(tensor.numel() * tensor.element_size() for tensor in iterate_tensors(parts))  # as wholes
    if needed > free:
        raise ConfigError(
            f"A checkpoint in one file is staged in the temporary folder {folder!r}, which has {in_units(free)} free, "
            f"and takes {in_units(needed)}; set TMPDIR to a folder with more room, or use single_file=False, which "
            "stages nothing on a disk."
        )
