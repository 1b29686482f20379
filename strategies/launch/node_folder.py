"""NodeFolder: files in shared memory that outlive the workers of a node, and go with its agent."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final, Self

from ..errors import ProcessError

_PREFIX: Final = "echelon-node-"
_SHARED_MEMORY: Final = Path("/dev/shm")
_LEAST: Final = 1 << 20  # bytes that must be free for a folder to be of any use
_REMEDY: Final = (
    "give the container more shared memory (docker run --shm-size=8g; in Kubernetes an emptyDir with "
    "medium: Memory at /dev/shm), or make room there"
)


class NodeFolder:
    """A folder that only this user can open, held by the agent of a node.

    The owner holds a lock on it, which the kernel releases with its death, whatever the process ids of containers that
    share the memory say: so the next owner knows which folders are nobody's. Usable as a context manager.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, parent: Path | None = None) -> Self:
        """Make a folder, in memory where there is any, and remove those of this user whose owners are dead.

        Raises:
            ProcessError: if there is no room or no permission.
        """
        parent = _place() if parent is None else parent
        try:
            _sweep(parent)
            if (free := free_bytes(parent)) < _LEAST:
                raise OSError(errno.ENOSPC, f"{free} bytes are free")
            # Hidden until it is locked, as the sweep of another owner would take it for nobody's.
            hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}{os.getpid()}-", dir=parent))
            lock = _open(hidden)
            with contextlib.suppress(OSError):  # a file system without locks: there nothing is swept either
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path = hidden.rename(parent / hidden.name[1:])
        except OSError as error:
            raise _refused(parent, error) from error
        return cls(path, lock)

    def remove(self) -> None:
        """Delete the folder and all that is in it; a second time does nothing."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def check_owner(folder: Path) -> None:
    """Check that a folder is this user's, and closed to all others: what lies in it is trusted.

    Raises:
        ProcessError: if it is not, or does not exist.
    """
    try:
        found = folder.lstat()
    except OSError as error:
        raise _refused(folder, error) from error
    if not _is_private(found):
        raise ProcessError(
            f"{folder} belongs to user {found.st_uid} with mode {stat.filemode(found.st_mode)}, and this process to "
            f"user {os.geteuid()}; what is in it is not trusted. Remove it, and let the agent make its own."
        )


def free_bytes(folder: Path) -> int:
    """Return how many bytes can still be written to a folder."""
    found = os.statvfs(folder)
    if found.f_blocks == 0:  # a tmpfs without a limit
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return found.f_bavail * found.f_frsize


def allocate(file: Path, size: int) -> None:
    """Make a file of `size` zero bytes, in place of one of that name, whose memory is there for certain.

    Without that, a write to a mapping of the file kills the process (SIGBUS) when memory runs out.

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
        raise _refused(file, error, size) from error


def _place() -> Path:
    is_there = _SHARED_MEMORY.is_mount() and os.access(_SHARED_MEMORY, os.W_OK | os.X_OK)
    return _SHARED_MEMORY if is_there else Path(tempfile.gettempdir())


def _refused(path: Path, error: OSError, size: int | None = None) -> ProcessError:
    what = str(path) if size is None else f"{path} of {size} bytes"
    if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
        free = free_bytes(path if path.is_dir() else path.parent)
        return ProcessError(f"There is no room for the node's files in {what}, {free} bytes are free: {_REMEDY}.")
    return ProcessError(
        f"{what} cannot be used for the node's files: {error}. Let user {os.geteuid()} write there, or set TMPDIR to a "
        "folder where it can."
    )


def _is_private(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _sweep(parent: Path) -> None:
    """Remove the folders of this user that no process holds."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # gone by now, another user's, or held
            lock = _open(folder)
            try:
                if _is_private(os.fstat(lock)):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
