"""Folder of a run on one node, which is removed after its owning process ends, however that happens."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import sys
import tempfile
from pathlib import Path
from typing import Final, Self

from ...common.errors import ConfigError, ProcessError

_PREFIX: Final = "echelon-node-"
_SHARED_MEMORY: Final = Path("/dev/shm")
_MIN_FREE: Final = 1 << 20  # bytes that must be free for a folder to be useful
_REMEDY: Final = (
    "give the container more shared memory (docker run --shm-size=8g; in Kubernetes an emptyDir with medium: Memory "
    "at /dev/shm), or delete files there"
)


def refuse_without_forks() -> None:
    """Refuse to start the processes of a run where none can be forked.

    Raises:
        ConfigError: on such a system, which is Windows.
    """
    if not hasattr(os, "fork"):
        raise ConfigError(
            f"The processes of a run are forked, which {sys.platform} cannot do; use strategy='single' on one device, "
            "or run it under WSL 2, which is a Linux."
        )


class NodeFolder:
    """Folder that only this user can open, locked by its owner. Usable as a context manager.

    The kernel releases the lock when the owner dies, so that the next owner can tell which folders are abandoned.
    Process ids would not work: containers that share the memory have their own.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, parent: Path | None = None) -> Self:
        """Create a folder, in shared memory if possible, and remove this user's folders whose owners are dead.

        Raises:
            ConfigError: on a system without forks.
            ProcessError: if there is no room or no permission.
        """
        refuse_without_forks()
        parent = _default_parent() if parent is None else parent
        try:
            _remove_unlocked_folders(parent)
            if (free := free_bytes(parent)) < _MIN_FREE:
                raise OSError(errno.ENOSPC, f"{free} bytes are free")
            # Hidden until it is locked: the sweep of another owner would remove it.
            hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}{os.getpid()}-", dir=parent))
            lock = _open_folder(hidden)
            with contextlib.suppress(OSError):  # a file system without locks, where nothing is removed either
                _lock_folder(lock)
            path = hidden.rename(parent / hidden.name[1:])
        except OSError as error:
            raise _unusable_error(parent, error) from error
        return cls(path, lock)

    def remove(self) -> None:
        """Delete the folder with its content; a second call does nothing."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def check_owner(folder: Path) -> None:
    """Check that a folder belongs to this user and is closed to others, since its content is trusted.

    Raises:
        ProcessError: if it is not, or does not exist.
    """
    try:
        status = folder.lstat()
    except OSError as error:
        raise _unusable_error(folder, error) from error
    if not _is_private(status):
        raise ProcessError(
            f"{folder} belongs to user {status.st_uid} with mode {stat.filemode(status.st_mode)}, but must belong to "
            f"user {os.geteuid()} alone for its content to be trusted. Remove it, and let the agent create its own."
        )


def free_bytes(folder: Path) -> int:
    """Return the number of bytes that can still be written to a folder."""
    status = os.statvfs(folder)
    if status.f_blocks == 0:  # a tmpfs without a limit
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return status.f_bavail * status.f_frsize


def allocate_file(file: Path, size: int) -> None:
    """Create a file of `size` zero bytes, replacing any existing one, and reserve its memory.

    Without the reservation, a write to a mapping of the file kills the process (SIGBUS) when memory runs out.

    Raises:
        ProcessError: if there is no room or no permission.
    """
    try:
        file.unlink(missing_ok=True)
        descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, size)
            else:  # macOS
                os.write(descriptor, bytes(size))
        except OSError:
            file.unlink()
            raise
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _unusable_error(file, error, size) from error


def _default_parent() -> Path:
    is_usable = _SHARED_MEMORY.is_mount() and os.access(_SHARED_MEMORY, os.W_OK | os.X_OK)
    return _SHARED_MEMORY if is_usable else Path(tempfile.gettempdir())


def _unusable_error(path: Path, error: OSError, size: int | None = None) -> ProcessError:
    place = str(path) if size is None else f"{path} of {size} bytes"
    if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
        free = free_bytes(path if path.is_dir() else path.parent)
        remedy = _REMEDY if _SHARED_MEMORY in (path, *path.parents) else "make room there, or set TMPDIR"
        return ProcessError(f"There is no room for the node's files in {place}, where {free} bytes are free: {remedy}.")
    return ProcessError(
        f"{place} cannot be used for the node's files: {error}. Let user {os.geteuid()} write there, or set TMPDIR to "
        "a folder where it can."
    )


def _is_private(status: os.stat_result) -> bool:
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _open_folder(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _lock_folder(descriptor: int) -> None:
    """Lock an open folder; an OSError says that another process has locked it, or that there are no locks."""
    import fcntl  # not on Windows, where no workers start

    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_unlocked_folders(parent: Path) -> None:
    """Remove the folders of this user that no process has locked."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # gone by now, another user's, or locked
            lock = _open_folder(folder)
            try:
                if _is_private(os.fstat(lock)):
                    _lock_folder(lock)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
