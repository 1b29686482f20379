"""Room for staging: a checkpoint in one file lies on the local disk before it is sent to a store."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, cast

from torch import Tensor

from ...callbacks.model_checkpoint import ModelCheckpoint
from ...common.errors import ConfigError
from ...common.storage import is_url
from ...common.units import in_units
from ..session.session import Session


class SavesFiles(Protocol):
    """The trainer, as far as it says in which form it saves."""

    @property
    def saves_single_files(self) -> bool:
        """Whether a checkpoint is one file if `save_checkpoint` is not told otherwise."""


def check_room(session: Session, parts: Mapping[str, Any]) -> None:
    """Check that the temporary folder has room for the tensors of a state, where a run stages it there.

    Raises:
        ConfigError: on the first rank, which writes the file, if it has not.
    """
    savers = [one for one in session.callbacks if isinstance(one, ModelCheckpoint) and is_url(one.dirpath)]
    default = cast(SavesFiles, session.run).saves_single_files
    if session.strategy.rank != 0 or not any(default if one.single_file is None else one.single_file for one in savers):
        return
    try:
        folder = tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise ConfigError(
            f"A checkpoint in one file is staged in the temporary folder, and there is none ({error}); set TMPDIR to "
            "a folder that can be written, or use single_file=False."
        ) from error
    needed = sum(_sizes(parts))
    if needed > free:
        raise ConfigError(
            f"A checkpoint in one file is staged in the temporary folder {folder!r}, which has {in_units(free)} free, "
            f"and takes {in_units(needed)}; set TMPDIR to a folder with more room, or use single_file=False, which "
            "stages nothing on a disk."
        )


def _sizes(value: Any) -> Iterator[int]:
    """Yield the bytes of each tensor in a state, as a whole."""
    if isinstance(value, Tensor):
        yield value.numel() * value.element_size()
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _sizes(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _sizes(item)
