"""Folders in which a run is going to save: they are held before the last checkpoint is chosen or a file is touched.

The job that was there before, told to end within a step, saves once more: what was chosen earlier would be stale. A run
that is refused has changed none of the files of the run that is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial

from ...callbacks.helpers.folder_lock import LOCK, FolderLock
from ...callbacks.helpers.loggers import tell_loggers
from ...callbacks.model_checkpoint import ModelCheckpoint
from ...common.errors import CheckpointError
from ...common.storage import AnyPath, StorePath, as_path, home_of
from ..checkpoint import list_checkpoints, load
from ..checkpoint.in_store.links import link_target
from ..checkpoint.in_store.store_folder import sweep_stored
from ..checkpoint.manifest import read_manifest
from ..loggers.base import continue_in_folders
from ..loggers.tracker import continue_saved_runs
from ..session.session import Session
from .find_checkpoint import find_checkpoint, folders_of_runs, last_across_nodes


def names_a_link(session: Session, ckpt_path: str | AnyPath | None) -> bool:
    """Return whether a path is ``last`` or a link, such as last.ckpt, on rank 0. Collective: every rank calls it."""

    def is_link() -> bool:
        return ckpt_path == "last" or link_target(as_path(ckpt_path or "")) is not None

    return session.strategy.ranks.all.on_first_rank(is_link)


def hold_and_choose(session: Session, ckpt_path: str | AnyPath | None, *, is_link: bool) -> AnyPath | None:
    """Hold the folders in which a fit will save; return where it resumes, chosen again for ``last`` or another link.

    The last checkpoint is that of which the nodes have all parts. Collective: every rank calls it.

    Raises:
        CheckpointError: if another run holds one of the folders, and does not end soon; or if no node has a part.
    """
    found = session.resumed_from
    if is_link and session.task == "fit" and not session.is_restarted:
        found = session.strategy.ranks.all.on_first_rank(partial(_hold_and_choose, session))
    if ckpt_path == "last" and not session.is_restarted:
        where = session.loggers, _find_savers(session)[0], session.run.default_root_dir
        is_fit = session.task == "fit"
        return last_across_nodes(
            found, session.strategy, partial(folders_of_runs, *where), part="loop" if is_fit else None
        )
    return found


def _hold_and_choose(session: Session) -> AnyPath | None:
    all_savers, savers = _find_savers(session)
    where = session.loggers, all_savers, session.run.default_root_dir
    found, held = session.resumed_from, set[AnyPath]()
    link = found if found is not None and link_target(found) is not None else None
    if link is not None and savers:
        found = link_target(link)
    if found is None and savers:
        _wait_for_runs(folders_of_runs(*where))
    while savers:
        places = {as_path(one.dirpath) for one in savers if one.is_dirpath_given}
        if found is not None and not all(one.is_dirpath_given for one in savers):
            places.add(found.parent)  # the folders of that run are those of this one
        _hold_folders(session, places - held)
        held |= places
        if link is None and found is not None and _is_newest(found, folders_of_runs(*where)):
            break
        before = found
        is_spread = session.strategy.ranks.all.spans_nodes
        found = link_target(link) if link else find_checkpoint("last", *where, to_resume=True, takes_parts=is_spread)
        if found == before:
            break
    return found


def open_loggers(session: Session) -> list[int | str | None]:
    """Let loggers open their folders, those of a resumed run, and return their versions; on rank 0.

    Raises:
        CheckpointError: if another run saves into them.
    """
    loggers, resumed_from = session.loggers, None if session.is_restarted else session.resumed_from
    if resumed_from is not None:
        tell_loggers(loggers, "continue_run", resumed_from)
        has_tracker = any(hasattr(logger, "continue_saved") for logger in loggers)
        if (has_tracker or len(loggers) > 1) and "loggers" in read_manifest(resumed_from).parts:
            runs = load(resumed_from, parts=("loggers",))["loggers"]
            continue_saved_runs(loggers, runs)
            continue_in_folders(loggers, runs)
    session.held.callback(_drop_empty_folders, session)  # once all that is held has left them
    trackers = [logger for logger in loggers if hasattr(logger, "continue_saved")]
    tell_loggers([logger for logger in loggers if logger not in trackers], "open")  # creates folders, and only that
    if not loggers or loggers[0].version is not None:  # a tracker gives a new run its id when it opens
        default = home_of(session.run.log_dir) / "checkpoints"
        _hold_folders(
            session, {as_path(one.dirpath) if one.is_dirpath_given else default for one in _find_savers(session)[1]}
        )
    tell_loggers(trackers, "open")
    return [logger.version for logger in loggers]


def _drop_empty_folders(session: Session) -> None:
    """Remove the folders of a run that has failed before it wrote into them."""
    if session.has_failed:
        tell_loggers(session.loggers, "drop_empty_folder")


def _find_savers(session: Session) -> tuple[list[ModelCheckpoint], list[ModelCheckpoint]]:
    """Return every `ModelCheckpoint` of a run, and those that save."""
    every = [one for one in session.callbacks if isinstance(one, ModelCheckpoint)]
    return every, [one for one in every if one.save_top_k or one.save_last or one.save_on_exception]


def _hold_folders(session: Session, folders: Iterable[AnyPath]) -> None:
    """Hold folders until the run ends."""
    for folder in folders:
        lock = FolderLock()
        lock.take_for(session.run, folder)
        session.held.callback(lock.release)
        if isinstance(folder, StorePath):
            with suppress(OSError):  # a save there says what is wrong
                sweep_stored(folder)


def _is_newest(found: AnyPath, folders: Sequence[str]) -> bool:
    """Return whether nothing is newer than what was verified before."""
    known = list_checkpoints(*folders)
    return bool(known) and known[-1].path == found


def _wait_for_runs(folders: Sequence[str]) -> None:
    """Wait for runs that have saved nothing yet, and may be about to end with their first checkpoint."""
    for folder in map(as_path, folders):
        if (folder / LOCK).exists():
            lock = FolderLock()
            with suppress(CheckpointError):  # it goes on: this is another run
                lock.take(folder, run=0)
            lock.release()
