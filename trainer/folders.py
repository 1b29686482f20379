"""Folders of a run: relative ones are those of the moment at which it starts; of URLs, the local ones and their copies.

A hook may change the directory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from ..callbacks.callback import Callback
from ..callbacks.helpers.loggers import local_folder, run_folder, tell_loggers
from ..callbacks.run import Logger
from ..common.storage import Mirror, StorePath, check_store, home_of, is_url
from .checks import check_current_folder, check_writable
from .loggers.base import NAMES_ONLY
from .session.session import Session

_TO_END: Final = 120.0
_TO_END_INTERRUPTED: Final = 15.0
"""Seconds for the last copies: where a run is told to end, its node is about to go."""


def settle_folders(
    root: Path, callbacks: Iterable[Callback], loggers: Sequence[Logger], *, writes: bool, saves: bool
) -> Path:
    """Make the folders of callbacks and loggers absolute, and return the root as an absolute path.

    Raises:
        ConfigError: if the run `writes` to its root, or `saves` with callbacks, and files cannot be created there; if
            the store of a logger does not answer or does not permit it; without a current folder.
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
    for store in {getattr(logger, "store_dir", None) for logger in loggers}:
        if isinstance(store, StorePath) and not (writes and store.is_relative_to(home_of(root))):
            check_store(store, "save_dir")
    settle_callbacks(callbacks)
    tell_loggers(loggers, "settle")
    return root.absolute()


def settle_callbacks(callbacks: Iterable[Callback]) -> None:
    """Make the paths of callbacks absolute."""
    for callback in callbacks:
        for name in callback.path_attributes:
            path = getattr(callback, name)
            if path and not is_url(path):
                setattr(callback, name, type(path)(os.path.abspath(path)))


def mirror_folders(session: Session) -> None:
    """Copy what a run writes into the folders of its loggers to the store, if they belong to a URL, until it ends.

    The first process of each node copies: the files of a ledger may be those of any rank.
    """
    if session.strategy.local_rank == 0:
        session.held.mirrors = [
            _make_mirror(session, folder, home) for folder, home in _spooled_folders(session).items()
        ]
        for mirror in session.held.mirrors:
            if session.task == "fit" and mirror.is_first:
                mirror.fetch()
            mirror.start()
        session.held.callback(_close_mirrors, session)


def _close_mirrors(session: Session) -> None:
    """Send what is left, also of a run that found another folder taken, and so writes elsewhere than it had thought."""
    mirrored = {mirror.folder for mirror in session.held.mirrors}
    late = [_make_mirror(session, *place) for place in _spooled_folders(session).items() if place[0] not in mirrored]
    interruption = session.interruption
    with interruption.listening(lambda: session.saves.last):
        for mirror in (*session.held.mirrors, *late):
            mirror.close(lambda: _TO_END if interruption.received is None else _TO_END_INTERRUPTED)
    if interruption.received is not None and not interruption.is_requested:
        interruption.signal = interruption.received  # only now: the run ends as it asks for, after the last copies


def _make_mirror(session: Session, folder: Path, home: StorePath) -> Mirror:
    return Mirror(folder, home, names_only=NAMES_ONLY, is_first=session.strategy.rank == 0)


def _spooled_folders(session: Session) -> dict[Path, StorePath]:
    """Return the local folders of a run that belong to a URL, with that."""
    root = session.run.default_root_dir
    folders = [Path(session.run.log_dir), *(run_folder(logger, root) for logger in session.loggers)]
    if session.profiler.dirpath is not None:
        folders.append(local_folder(session.profiler.dirpath))
    homes = {folder: home_of(folder) for folder in folders}
    return {folder: home for folder, home in homes.items() if isinstance(home, StorePath)}
