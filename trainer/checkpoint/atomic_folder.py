"""Atomic commit of a folder or a file, which appears under its name whole or not at all; then the old one goes."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from ...common.errors import CheckpointError
from ...common.flush import flush_to_disk
from ...common.proc_status import host_id, process_exists
from ...common.storage import AnyPath, Pending, StorePath, as_path
from .files import explain_os_error
from .in_store.links import write_link
from .in_store.store_folder import committed_to_store, discard_stored, working_store_folder
from .manifest import MANIFEST, is_checkpoint, is_torch_file, read_manifest
from .on_nodes.on_disk import manifest_digest

_TEMPORARY: Final = re.compile(r"\.(?P<name>.+)\.(?P<host>[^.]+)\.(?P<pid>\d+)\.[0-9a-f]{8}\.(?P<kind>new|old|gone)")
_SILENCE: Final = 24 * 3600.0
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


@contextmanager
def commit_when_done(path: AnyPath, *, is_file: bool = False, pending: Pending | None = None) -> Iterator[AnyPath]:
    """Yield a new folder to write to, and make it appear as `path` when the block ends without an error.

    A checkpoint or link of that name is replaced in one step. The block must flush everything that it writes to disk.
    In a store, the block must have written a manifest. With `is_file` the block gets the name of a new file, which it
    must create; it also replaces a file of ``torch.save``, and an empty one. `pending` counts what a store has of it.

    Raises:
        CheckpointError: if it cannot be written, or if `path` is not a checkpoint.
    """
    if isinstance(path, StorePath):
        try:
            with committed_to_store(path, is_file=is_file, pending=pending) as place:
                yield place
        except OSError as error:
            raise failed_write(path, error) from error
        return
    path = path.absolute()
    temporary = _temporary_path(path, "new")
    try:
        if not (is_file and is_torch_file(path)):
            _check_replaceable(path)
        _make_folders(path.parent)
        delete_abandoned(path.parent)
        if not is_file:
            temporary.mkdir()
        yield temporary
        if not is_file:
            flush_to_disk(temporary)
        _move_into_place(temporary, path)
    except OSError as error:
        raise failed_write(path, error) from error
    finally:
        _delete_temporary(temporary)


class PreparedFolder:
    """A new folder that is filled, and gets its name when another process has decided so; else it can be found again.

    If this process dies before, `find_part` finds it for whoever knows the decision.

    Raises:
        CheckpointError: if it cannot be made, or if `path` is not a checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self.folder = _temporary_path(self._path, "new")
        try:
            _check_replaceable(self._path)
            _make_folders(self._path.parent)
            self.folder.mkdir()
        except OSError as error:
            raise failed_write(path, error) from error

    def flush(self) -> None:
        """Flush the names in the folder to disk, once its files are."""
        flush_to_disk(self.folder)

    def give_name(self) -> None:
        """Make it appear under its name; what had that name is deleted."""
        give_name(self.folder, self._path)

    def discard(self) -> None:
        """Delete it."""
        _delete_temporary(self.folder)


def give_name(folder: Path, path: Path) -> None:
    """Make a complete folder appear under its name; what had that name is deleted.

    Raises:
        CheckpointError: if it cannot be renamed.
    """
    try:
        _move_into_place(folder, path)
    except OSError as error:
        raise failed_write(path, error) from error
    finally:
        _delete_temporary(folder)


def find_part(path: Path, digest: str) -> Path | None:
    """Return where this node has its part of a checkpoint whose manifest has this hash; None if nowhere.

    One that a process prepared, and died before it was named, gets its name.
    """
    if manifest_digest(path) == digest:
        return path
    prepared = [
        entry
        for entry in list_unfinished(path.parent)
        if _match_temporary_name(entry)["name"] == path.name
        and _match_temporary_name(entry)["kind"] == "new"
        and manifest_digest(entry) == digest
    ]
    if prepared and _is_abandoned(prepared[0]):
        give_name(prepared[0], path)
        return path
    return prepared[0] if prepared else None


@contextmanager
def working_folder(path: AnyPath) -> Iterator[AnyPath]:
    """Yield a new folder beside `path`, which is deleted afterwards, or by the next save if this process is killed."""
    if isinstance(path, StorePath):
        with working_store_folder(path) as place:
            yield place
        return
    temporary = _temporary_path(path.absolute(), "new")
    try:
        temporary.mkdir()
        yield temporary
    finally:
        _delete_temporary(temporary)


def failed_write(path: AnyPath, error: OSError) -> CheckpointError:
    """Return an error that says why a checkpoint could not be written."""
    return CheckpointError(
        f"The checkpoint {path} could not be written: {explain_os_error(error)}. Earlier checkpoints are untouched."
    )


def discard_checkpoint(path: AnyPath) -> None:
    """Delete a checkpoint: its name is gone at once, its files follow.

    Raises:
        CheckpointError: if it cannot be deleted.
    """
    try:
        if isinstance(path, StorePath):
            discard_stored(path)
            return
        discarded = _temporary_path(path, "gone")
        path.rename(discarded)
        flush_to_disk(path.parent)
        _delete_temporary(discarded)
    except OSError as error:
        raise CheckpointError(f"The checkpoint {path} could not be deleted: {explain_os_error(error)}.") from error


def point_link(link: str | AnyPath, path: str | AnyPath) -> None:
    """Make `link` a relative symbolic link to the checkpoint at `path`, atomically replacing what it was.

    In a store it is a small object that names the checkpoint.

    Raises:
        CheckpointError: if `path` is not a checkpoint, or `link` is neither a link nor a checkpoint.
    """
    link, path = as_path(link).absolute(), as_path(path).absolute()
    if isinstance(link, StorePath) or isinstance(path, StorePath):
        _point_in_store(link, path)
        return
    temporary = _temporary_path(link, "new")
    try:
        if not is_checkpoint(path):
            raise CheckpointError(f"{link} cannot point to {path}, which is not a checkpoint; save it first.")
        _check_replaceable(link)
        _make_link(temporary, path)
        _move_into_place(temporary, link)
    except OSError as error:
        raise CheckpointError(f"The link {link} could not be written: {explain_os_error(error)}.") from error
    finally:
        _delete_temporary(temporary)


def _point_in_store(link: AnyPath, path: AnyPath) -> None:
    try:
        if not (isinstance(link, StorePath) and isinstance(path, StorePath) and is_checkpoint(path)):
            raise CheckpointError(f"{link} cannot point to {path}, which is not a checkpoint there; save it first.")
        if (link / MANIFEST).is_file():
            raise CheckpointError(f"{link} is a checkpoint, so no link replaces it; give the link another name.")
        write_link(link, path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"The link {link} could not be written ({error}); check the store.") from error


def _make_link(link: Path, path: Path) -> None:
    """Make a symbolic link to a checkpoint or, where the system has or permits none, a copy that shares its files."""
    try:
        link.symlink_to(os.path.relpath(path.resolve(), link.parent.resolve()))
    except (OSError, NotImplementedError):  # Windows asks for a privilege; FAT and some shares have no links
        path = path.resolve()
        if path.is_dir():
            shutil.copytree(path, link, copy_function=_same_file)
        else:
            _same_file(path, link)


def _same_file(source: str | Path, target: str | Path) -> None:
    """Give a file another name; copy it where it can have one only."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def delete_abandoned(folder: Path) -> None:
    """Delete what dead writers left in `folder`; restore the name of a checkpoint that they were replacing."""
    for entry in list_unfinished(folder):
        with suppress(OSError):  # another run is deleting it, or we may not delete it
            if not _is_abandoned(entry):
                continue
            if is_stranded(entry):
                entry.rename(entry.with_name(_match_temporary_name(entry)["name"]))
            else:
                _delete_temporary(entry)


def is_stranded(path: Path) -> bool:
    """Return whether this is a complete checkpoint that lost its name because its writer died replacing it."""
    name = _TEMPORARY.fullmatch(path.name)
    if name is None or name["kind"] != "old":
        return False
    return is_checkpoint(path) and not os.path.lexists(path.with_name(name["name"]))


def list_unfinished(folder: Path) -> list[Path]:
    """Return the temporary folders of writes and removals in a folder, both in progress and left behind."""
    return [entry for entry in sorted(folder.iterdir()) if _TEMPORARY.fullmatch(entry.name)] if folder.is_dir() else []


def _check_replaceable(path: Path) -> None:
    if not path.exists() or path.is_symlink():
        return
    try:
        read_manifest(path)
    except CheckpointError as error:
        if not is_checkpoint(path):
            raise CheckpointError(
                f"{path} exists and is not a checkpoint, so it is not overwritten; choose another name."
            ) from error


def _move_into_place(new: Path, path: Path) -> None:
    """Give `new` the name `path`, and delete what had that name."""
    if new.is_symlink() and (path.is_symlink() or not path.exists()):
        new.replace(path)
    # the second exchange is for a name that another writer has taken since the first attempt
    elif not (_exchange_names(new, path) or _rename_unless_taken(new, path) or _exchange_names(new, path)):
        # no atomic exchange here (NFS, macOS): if we die between the renames, the old one is found as stranded
        old = _temporary_path(path, "old")
        path.rename(old)
        new.rename(path)
        flush_to_disk(path.parent)
        _delete_temporary(old)
    flush_to_disk(path.parent)


def _rename_unless_taken(new: Path, path: Path) -> bool:
    """Give `new` the name `path`; return False if it is taken."""
    try:
        new.rename(path)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR):
            return False
        raise
    return True


def _exchange_names(first: Path, second: Path) -> bool:
    """Swap two names in one atomic step; return False if the system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if rename is None:
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0)


def _delete_temporary(path: Path) -> None:
    """Delete a temporary entry; what cannot be deleted is swept by the next save in its folder."""
    with suppress(OSError):
        if path.is_symlink() or path.is_file():
            path.unlink(missing_ok=True)
        elif path.is_dir():
            gone = path.with_suffix(".gone")
            with suppress(OSError):
                path.rename(gone)  # a rank that is still writing can no longer find it or add to it
                path = gone
            shutil.rmtree(path, ignore_errors=True)


def _make_folders(folder: Path) -> None:
    if folder.is_dir():
        return
    _make_folders(folder.parent)
    folder.mkdir(exist_ok=True)
    flush_to_disk(folder.parent)


def _temporary_path(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{host_id()}.{os.getpid()}.{secrets.token_hex(4)}.{kind}")


def _match_temporary_name(entry: Path) -> re.Match[str]:
    match = _TEMPORARY.fullmatch(entry.name)
    assert match is not None
    return match


def _is_abandoned(entry: Path) -> bool:
    """Return whether the writer is dead; one on another machine counts as dead after a day without a write."""
    name = _match_temporary_name(entry)
    if name["host"] == host_id():
        return not process_exists(int(name["pid"]))
    files = list(entry.iterdir()) if entry.is_dir() and not entry.is_symlink() else []
    return time.time() - max(file.lstat().st_mtime for file in (entry, *files)) > _SILENCE
