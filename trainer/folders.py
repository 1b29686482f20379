"""Folders of a run: relative ones are those of the moment at which it starts, also if a hook changes the directory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..callbacks.callback import Callback
from ..callbacks.helpers.loggers import tell
from ..callbacks.run import Logger
from ..common.storage import StorePath, as_path, check_store, home_of, is_url, spool_folder
from .checks import check_current_folder, check_writable


def local_root(given: str | Path | None) -> Path:
    """Return the folder for what has no other; of a URL, the local one whose files are copied there."""
    root = as_path(given or ".")
    return spool_folder(root) if isinstance(root, StorePath) else root


def settle_folders(
    root: Path, callbacks: Iterable[Callback], loggers: Sequence[Logger], *, writes: bool, saves: bool
) -> Path:
    """Make the folders of callbacks and loggers absolute, and return the root as an absolute path.

    Raises:
        ConfigError: if the run `writes` to its root, or `saves` with callbacks, and files cannot be created there;
            without a current folder.
    """
    check_current_folder()
    callbacks = list(callbacks)
    if writes:
        check_writable(root)
        home = home_of(root)
        if isinstance(home, StorePath):
            check_store(home)
    for place in {str(getattr(one, name)) for one in callbacks for name in one.path_attributes if saves}:
        if is_url(place):
            check_store(StorePath.parse(place), "dirpath")
    settle_callbacks(callbacks)
    tell(loggers, "settle")
    return root.absolute()


def settle_callbacks(callbacks: Iterable[Callback]) -> None:
    """Make the paths of callbacks absolute."""
    for callback in callbacks:
        for name in callback.path_attributes:
            path = getattr(callback, name)
            if path and not is_url(path):
                setattr(callback, name, type(path)(os.path.abspath(path)))
