"""Checkpoints in a folder: all by age, the newest valid one, the one that the user names, and their removal."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from ...common.errors import CheckpointError, MissingCheckpointError
from ...common.other_trainers import is_of_another_trainer
from ...common.storage import AnyPath, StorePath, as_path
from ...common.storage.store import in_parallel
from ...strategies.state.schema import time_text
from .atomic_folder import discard_checkpoint, is_stranded
from .files import explain_os_error
from .in_store.links import link_target
from .in_store.store_folder import list_checkpoints_in, list_link_targets
from .manifest import MANIFEST, Manifest, is_checkpoint, is_checkpoint_file, read_manifest
from .on_nodes.on_disk import files_on_other_nodes

_TRIES: Final = 20

_logger = logging.getLogger("echelon")


@dataclass(frozen=True)
class FoundCheckpoint:
    """A folder or file that is, or was intended to be, a checkpoint."""

    path: AnyPath
    saved_at: str
    manifest: Manifest | None
    fault: str = ""
    """The reason why the manifest cannot be used; empty if it can."""


def list_checkpoints(*folders: str | AnyPath) -> list[FoundCheckpoint]:
    """Return the checkpoints in folders, oldest first, including those with a damaged manifest but not links."""
    for _ in range(_TRIES):
        paths = [path for folder in folders for path in _list_candidates(as_path(folder))]
        known = [checkpoint for checkpoint in in_parallel(_look_at, paths) if checkpoint is not None]
        if len(known) == len(paths):  # none was deleted since, for one that is not in the list
            break
    return sorted(known, key=lambda checkpoint: (checkpoint.saved_at, checkpoint.path.name))


def newest_valid(*folders: str | AnyPath, part: str | None = None, takes_parts: bool = False) -> AnyPath | None:
    """Return the newest checkpoint (with this `part`) that verifies completely; None if there are no checkpoints.

    Each newer one that is damaged is reported to the logger ``echelon``. The returned one was just verified: load it
    with ``verify=False``. In a store, only the sizes of its files are compared, and hashes when they are read. With
    `takes_parts`, one of which only the part of this node is here is valid, too.

    Raises:
        CheckpointError: if there are checkpoints, and all are damaged.
    """
    faults: list[str] = []
    found = list_checkpoints(*folders)
    while found:
        *found, checkpoint = found
        try:
            if checkpoint.manifest is None:
                raise CheckpointError(checkpoint.fault)
            if part is not None and part not in checkpoint.manifest.parts:
                continue
            check_complete(checkpoint.path, takes_part=takes_parts)
        except CheckpointError as error:
            if is_gone(checkpoint.path):  # deleted since, by a run that has saved a newer one
                found, faults = list_checkpoints(*folders), []
                continue
            _logger.warning("Skipped the checkpoint %s: %s", checkpoint.path, error)
            faults.append(str(error))
            continue
        return checkpoint.path
    if faults:
        raise CheckpointError(
            f"No checkpoint in {_join_names(folders)} can be used; leave out ckpt_path to train from the start. "
            f"{' '.join(faults)}"
        )
    return None


def check_complete(path: AnyPath, *, takes_part: bool = False) -> None:
    """Compare a checkpoint, or a part of one if that is taken, with the hashes in its manifest; in a store, only sizes.

    Raises:
        CheckpointError: with what is wrong.
    """
    if not isinstance(path, StorePath):
        from .loading import verify  # with torch, without which folders are listed

        verify(path, takes_part=takes_part)
        return
    manifest = read_manifest(path)
    if not path.is_file():
        _check_sizes(path, manifest)


def _check_sizes(path: StorePath, manifest: Manifest) -> None:
    """Compare the sizes of a checkpoint's objects with its manifest.

    Raises:
        CheckpointError: if one is missing or has another size.
    """
    found = {place.name: size for place, size in (path / manifest.folder).find().items()}
    wrong = [name for name, file in manifest.files.items() if found.get(name) != file.size]
    if wrong:
        raise CheckpointError(
            f"The checkpoint {path} is damaged: {wrong[0]} has {found.get(wrong[0], 'no')} bytes, not "
            f"{manifest.files[wrong[0]].size}. Use another one."
        )


def is_gone(path: AnyPath) -> bool:
    """Return whether a checkpoint is no longer there; not if it cannot be read."""
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def resolve_checkpoint(
    ckpt_path: str | AnyPath, *folders: str | AnyPath, part: str | None = None, takes_parts: bool = False
) -> AnyPath | None:
    """Return the checkpoint that the user names: a path, or ``last`` for the newest valid one in `folders`.

    For ``last``, the other arguments are those of `newest_valid`. That is None if there is no checkpoint yet, so that
    the same command starts and restarts a run.

    Raises:
        MissingCheckpointError: if nothing is at the path.
        CheckpointError: if it cannot be read or is not a checkpoint; the message says what is there.
    """
    if ckpt_path == "last":
        return newest_valid(*folders, part=part, takes_parts=takes_parts)
    path = as_path(ckpt_path)
    try:
        return _in_store_at(path) if isinstance(path, StorePath) else _checkpoint_at(path)
    except MissingCheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"ckpt_path={str(path)!r} cannot be read: {explain_os_error(error)}.") from error


def _in_store_at(path: StorePath) -> StorePath:
    target = link_target(path)
    if target is not None and not is_checkpoint(target):
        raise MissingCheckpointError(
            f"ckpt_path={str(path)!r} is a link to {target}, which no longer exists; give another path."
        )
    if target is not None or is_checkpoint(path) or path.is_file():
        return path
    if not path.is_dir():
        if path.parent == path:
            raise CheckpointError(f"ckpt_path={str(path)!r} has no objects; give the path of a checkpoint.")
        raise MissingCheckpointError(f"ckpt_path={str(path)!r} does not exist; give another path.{_suggest_path(path)}")
    inside = [checkpoint.path.name for checkpoint in list_checkpoints(path)]
    hint = f"a folder of checkpoints; give one of them: {', '.join(inside)}" if inside else "no complete checkpoint"
    raise CheckpointError(
        f"ckpt_path={str(path)!r} is {hint}{'' if inside else f': it has no {MANIFEST}; give another one'}."
    )


def _checkpoint_at(path: Path) -> Path:
    if is_checkpoint(path):
        return path.absolute()  # a hook may change directory before it is read
    if path.is_symlink() and not path.exists():
        raise MissingCheckpointError(
            f"ckpt_path={str(path)!r} is a link to {path.readlink()}, which no longer exists; give another path."
        )
    if path.is_file():
        maker = " of Lightning's" if is_of_another_trainer(path) else ""
        raise CheckpointError(
            f"ckpt_path={str(path)!r} is a file{maker}, not a checkpoint of Echelon's; to load the weights in a file, "
            "call echelon.load_weights."
        )
    if not path.exists():
        raise MissingCheckpointError(f"ckpt_path={str(path)!r} does not exist; give another path.{_suggest_path(path)}")
    inside = [checkpoint.path.name for checkpoint in list_checkpoints(path)]
    if inside:
        raise CheckpointError(
            f"ckpt_path={str(path)!r} is a folder of checkpoints; give one of them: {', '.join(inside)}."
        )
    raise CheckpointError(
        f"ckpt_path={str(path)!r} is not a checkpoint: it has no {MANIFEST} "
        f"(found: {', '.join(sorted(child.name for child in _children_of(path))[:5]) or 'nothing'}); give another one."
    )


def remove_checkpoint(path: str | AnyPath, lineage: str | None = None) -> bool:
    """Delete a checkpoint and return True, unless it is the newest valid one in its folder, or a link points to it.

    With a `lineage`, a checkpoint of another lineage is not deleted either.

    A newer one counts as valid if its files have the right sizes: reading all bytes at every save would take too long.

    Raises:
        CheckpointError: if `path` is not a checkpoint, or cannot be deleted.
    """
    path = as_path(path).absolute()
    siblings = list_checkpoints(path.parent)
    index = next((index for index, checkpoint in enumerate(siblings) if checkpoint.path == path), None)
    if index is None:
        raise CheckpointError(f"{path} is not a checkpoint, so it is not deleted; delete it by hand.")
    manifest = siblings[index].manifest
    if lineage is not None and (manifest is None or manifest.lineage != lineage):
        owner = "a damaged checkpoint" if manifest is None else "a checkpoint of another run"
        _logger.warning("%s is %s, so it is not deleted; delete it by hand.", path, owner)
        return False
    if _is_linked(path):
        _logger.info("%s is the target of a link in its folder, so it is not deleted.", path)
        return False
    is_newest = not any(_is_complete(newer) for newer in siblings[index + 1 :])
    if is_newest and _is_complete(siblings[index]):
        _logger.warning("%s is the newest valid checkpoint of its folder, so it is not deleted.", path)
        return False
    discard_checkpoint(path)
    return True


def _look_at(path: AnyPath) -> FoundCheckpoint | None:
    """Return a folder or file as a checkpoint; None if another run has just deleted it."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        if isinstance(path, StorePath):  # its manifest is damaged, or was deleted while this looked
            return FoundCheckpoint(path, "", None, str(error)) if is_checkpoint(path) else None
        try:
            changed = time_text(datetime.fromtimestamp(path.stat().st_mtime, UTC))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, OverflowError):  # an unreadable folder, or a time out of range
            changed = ""
        return FoundCheckpoint(path, changed, None, str(error))
    return FoundCheckpoint(path, manifest.saved_at, manifest)


def _is_linked(path: AnyPath) -> bool:
    try:
        if isinstance(path, StorePath):
            return path in list_link_targets(path.parent)
        links = [entry for entry in path.parent.iterdir() if entry.is_symlink()]
        return path.resolve() in (link.resolve() for link in links)
    except (OSError, RuntimeError):  # circular links
        return True


def _is_complete(checkpoint: FoundCheckpoint) -> bool:
    if checkpoint.manifest is None:
        return False
    try:
        if isinstance(checkpoint.path, StorePath):
            check_complete(checkpoint.path)
            return True
        # a file whose manifest can be read has the right size
        return checkpoint.path.is_file() or _has_its_files(checkpoint.path, checkpoint.manifest)
    except (OSError, CheckpointError):
        return False


def _has_its_files(path: Path, manifest: Manifest) -> bool:
    """Return whether the files of a checkpoint, or of a node's part of one, are here with the right sizes."""
    elsewhere = files_on_other_nodes(path, manifest)
    return all(
        (path / name).stat().st_size == file.size for name, file in manifest.files.items() if name not in elsewhere
    )


def _list_candidates(folder: AnyPath) -> Sequence[AnyPath]:
    try:
        if isinstance(folder, StorePath):
            return list_checkpoints_in(folder)
        return [path for path in folder.iterdir() if _is_candidate(path)] if folder.is_dir() else []
    except OSError as error:
        raise CheckpointError(f"The folder {folder} cannot be read: {explain_os_error(error)}.") from error


def _is_candidate(path: Path) -> bool:
    if path.name.startswith("."):  # being written or removed
        return is_stranded(path)
    if path.is_symlink():
        return False
    if not path.is_dir():
        return is_checkpoint_file(path)
    return path.suffix == ".ckpt" or (path / MANIFEST).is_file()


def _children_of(folder: AnyPath) -> Iterable[AnyPath]:
    try:
        return list(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise CheckpointError(f"The folder {folder} cannot be read: {explain_os_error(error)}.") from error


def _suggest_path(path: AnyPath) -> str:
    word = difflib.get_close_matches(str(path), ("last", "best"), n=1, cutoff=0.6)
    if word:
        return f" Did you mean {word[0]!r}?"
    names = [child.name for child in _children_of(path.parent) if not child.name.startswith(".")]
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.4)
    if near:
        return f" {path.parent} has {', '.join(near)}."
    return (
        f" The folder {str(path.parent.absolute())!r} has no such name among its {len(names)} entries."
        if path.parent.is_dir()
        else f" Neither does {path.parent}."
    )


def _join_names(folders: Iterable[str | AnyPath]) -> str:
    return ", ".join(str(folder) for folder in folders)
