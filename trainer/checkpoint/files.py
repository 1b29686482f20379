"""Files of a checkpoint: hashed while they are written, flushed to disk, and read as private memory maps."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import stat
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

from ...common.errors import CheckpointError, StoreError
from ...common.storage import AnyPath, FetchedFile, Pending, StorePath, Upload

HASH_NAME: Final = "sha256"
# With the processor's SHA instructions, sha256 reaches 1.2 GB/s, blake2b 0.8; and `sha256sum` is everywhere.

_BLOCK: Final = 8 << 20
_TRIES: Final = 20
# O_NONBLOCK: opening a named pipe must not wait for a writer that never comes
_BINARY: Final = getattr(os, "O_BINARY", 0)
"""Without it, Windows would change line ends; other systems do not have it."""
_READING: Final = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _BINARY


@dataclass(frozen=True)
class FileRecord:
    """The entry of a file in the manifest: its size in bytes and the hash of its contents in hex.

    In an in-memory snapshot the hash is empty: its index has a checksum that takes a tenth of the time.
    """

    size: int
    sha256: str


class _OnDisk:
    """A new file on a disk; like an `Upload`, it is written from the beginning to the end."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def write(self, data: memoryview) -> None:
        while data:
            data = data[os.write(self._descriptor, data[:_BLOCK]) :]

    def finish(self) -> None:
        os.fsync(self._descriptor)


class HashedFile:
    """A new file or object, hashed in a second thread while it is written.

    Args:
        path: its path.
        size: its bytes, if known.
        pending: what counts the bytes that a store has confirmed.
    """

    def __init__(self, path: AnyPath, size: int = 0, pending: Pending | None = None) -> None:
        self._target = Upload(path, size, pending) if isinstance(path, StorePath) else _OnDisk(path)
        self._hash = hashlib.new(HASH_NAME)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="echelon-hash")
        self._has_thread = True
        self._pending: list[Future[None]] = []
        self._small = bytearray()
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)
        self._target.__exit__(kind, error, trace)

    def write(self, data: bytes | memoryview, *, lasts: bool = True) -> None:
        """Append `data`; wait until it is hashed, unless it `lasts` unchanged until `finish`."""
        if len(data) < 1 << 16:
            self._small += data
            if len(self._small) >= _BLOCK:
                self._flush()
            return
        self._flush()
        self._put(memoryview(data))
        if not lasts:
            self._join()

    def finish(self) -> FileRecord:
        """Flush the file to disk, or make the object appear, and return its size and hash."""
        self._flush()
        self._target.finish()
        self._join()
        return FileRecord(self._size, self._hash.hexdigest())

    def _flush(self) -> None:
        if self._small:
            block, self._small = self._small, bytearray()
            self._put(memoryview(block))

    def _put(self, block: memoryview) -> None:
        try:
            if self._has_thread:
                self._pending.append(self._pool.submit(self._hash.update, block))
        except RuntimeError:  # at the interpreter's exit, or at the limit on processes and threads
            self._has_thread = False  # the pool has kept this block, and would hash it again with a later one
            self._join()
        if not self._has_thread:
            self._hash.update(block)
        self._size += len(block)
        self._target.write(block)

    def _join(self) -> None:
        while self._pending:
            self._pending.pop().result()


def write_bytes(path: AnyPath, data: bytes) -> FileRecord:
    """Write a new file and flush it to disk, or a new object."""
    with HashedFile(path) as file:
        file.write(data)
        return file.finish()


def hash_files(files: Mapping[str, MappedFile | FilePiece | FetchedFile]) -> dict[str, str]:
    """Return the hash of the contents of each file in hex, computed in four threads if there are any."""
    try:
        with ThreadPoolExecutor(4, thread_name_prefix="echelon-hash") as pool:
            return dict(zip(files, pool.map(lambda file: file.digest(), files.values()), strict=True))
    except RuntimeError:  # the limit on processes and threads
        return {name: file.digest() for name, file in files.items()}


class MappedFile:
    """A memory-mapped file of a checkpoint: private, so that writing to it does not change the file, or read-only.

    A read-only one does not count as memory of this process, however large it is. If only the header of a file is
    available, `whole_size` is greater than `size`. The file is looked up in the folder `held`, or is the file that is
    `held`; see `while_it_stays`.
    """

    def __init__(self, path: Path, *, is_private: bool = True, held: int | None = None) -> None:
        self.path = path
        access = mmap.ACCESS_COPY if is_private else mmap.ACCESS_READ
        if held is not None and stat.S_ISREG(os.fstat(held).st_mode):
            descriptor = os.dup(held)
        else:
            descriptor = os.open(path if held is None else path.name, _READING, dir_fd=held)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path} is not a regular file; use another checkpoint.")
            self.size = self.whole_size = status.st_size
            self.data = mmap.mmap(descriptor, 0, access=access) if self.size else mmap.mmap(-1, 1)
        finally:
            os.close(descriptor)

    def content(self) -> bytes:
        """Return all bytes."""
        return self.data[: self.size]

    def digest(self) -> str:
        """Return the hash of the contents in hex."""
        with memoryview(self.data)[: self.size] as view:
            return hashlib.new(HASH_NAME, view).hexdigest()


@dataclass(frozen=True)
class FilePiece:
    """Consecutive bytes of a file, which has a record of its own in the manifest of a checkpoint in one file."""

    file: MappedFile
    begin: int
    size: int

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self.file.path

    def content(self) -> bytes:
        """Return all bytes."""
        return self.file.data[self.begin : self.begin + self.size]

    def digest(self) -> str:
        """Return the hash of the bytes in hex."""
        with memoryview(self.file.data)[self.begin : self.begin + self.size] as view:
            return hashlib.new(HASH_NAME, view).hexdigest()


def pieces_of(file: MappedFile, records: Mapping[str, FileRecord]) -> dict[str, FilePiece]:
    """Return the files of a checkpoint in one file, which lie in it one after the other, as its manifest lists them.

    Raises:
        CheckpointError: if it is too short for them.
    """
    pieces: dict[str, FilePiece] = {}
    end = 0
    for name, record in records.items():
        pieces[name] = FilePiece(file, end, record.size)
        end += record.size
    if end > file.size:
        raise CheckpointError(f"{file.path} has {file.size} bytes, not {end} or more; use another checkpoint.")
    return pieces


def is_one_file(path: AnyPath, held: int | None) -> bool:
    """Return whether a checkpoint, which may be `held` open, is a file and not a folder.

    Raises:
        CheckpointError: if the disk does not say.
    """
    try:
        if isinstance(path, StorePath):
            return False  # one is read as a copy on disk
        return path.is_file() if held is None else stat.S_ISREG(os.fstat(held).st_mode)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {explain_os_error(error)}.") from error


T = TypeVar("T")


def while_it_stays(path: AnyPath, read: Callable[[int | None], T]) -> T:
    """Return what `read` returns for a folder, or a file, that is held open, which it gets as a file descriptor.

    A run moves its links, and replaces and deletes checkpoints, while others read: a reader sees the files of one
    checkpoint, and reads again, from what has the name then, if the one that it reads is deleted.
    """
    if isinstance(path, StorePath):
        return _while_it_stays_in_store(path, read)
    for _ in range(_TRIES):
        try:
            held = os.open(path, _READING)
        except OSError:
            return read(None)  # which says what is wrong with it
        try:
            return read(held if _can_be_held(held) else None)
        except CheckpointError:
            if _is_still(path, held):
                raise
        finally:
            with suppress(OSError):  # it was only read, and is closed all the same
                os.close(held)
    return read(None)


def _while_it_stays_in_store(path: StorePath, read: Callable[[int | None], T]) -> T:
    """Read again if what makes a folder a checkpoint was replaced meanwhile."""
    place = path / "manifest.json"
    for _ in range(_TRIES):
        before = _content_of(place)
        try:
            return read(None)
        except CheckpointError:
            if _content_of(place) in (before, None):
                raise
    return read(None)


def _content_of(place: StorePath) -> bytes | None:
    try:
        return place.read_bytes()
    except OSError:
        return None


def _can_be_held(held: int) -> bool:
    """Return whether what is open is a folder or a regular file, as far as the disk says so."""
    try:
        mode = os.fstat(held).st_mode
    except OSError:
        return False
    return stat.S_ISDIR(mode) or stat.S_ISREG(mode)


def _is_still(path: Path, held: int) -> bool:
    """Return whether a name is that of what is held open, or of nothing."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(held))
    except OSError:
        return True


def explain_os_error(error: OSError) -> str:
    """Return the operating system's error as text, with a remedy; a store's says it all."""
    if isinstance(error, StoreError):
        return str(error).rstrip(".")
    remedies = {
        errno.ENOSPC: "free some space, or save elsewhere",
        errno.EDQUOT: "free some of your quota, or save elsewhere",
        errno.EFBIG: "raise the limit on file sizes (ulimit -f), or save elsewhere",
        errno.EROFS: "save to a folder that can be written",
        errno.EACCES: "save to a folder that you may write, or change its permissions",
        errno.EPERM: "save to a folder that you may write, or change its permissions",
        errno.EINVAL: "give another file",
        errno.EIO: "check the health of the disk, and save elsewhere",
        errno.ENAMETOOLONG: "choose a shorter name",
    }
    remedy = remedies.get(error.errno or 0, "check the folder and its file system")
    code = errno.errorcode.get(error.errno or 0, "unknown error")
    where = f" at {error.filename}" if error.filename else ""
    return f"{error.strerror or error} ({code}){where}; {remedy}"
