"""Store: reading, writing, listing and deleting of objects through a filesystem of fsspec."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from .filesystem import READ_ONLY, Mount, forget_filesystem, mount_of
from .retry import Retry, default_retry

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

T = TypeVar("T")

PART: Final = 16 << 20
"""Bytes of a part of a large object, which is read or written in one request."""
IN_FLIGHT: Final = 4
"""Requests of one process at a time."""
_WITH_BUCKETS: Final = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "oci"})
_DELETED_AT_ONCE: Final = 500
_VERSIONS: Final = ("ETag", "etag", "generation", "md5Hash", "LastModified", "last_modified", "mtime", "created")
"""What stores and their clients call the tag of an object's content, or the time of its last change."""


class Located(Protocol):
    """An object or a folder, as a `StorePath` names it."""

    @property
    def scheme(self) -> str:
        """The scheme of its URL."""

    @property
    def key(self) -> str:
        """What follows the scheme, with the bucket first."""


@dataclass(frozen=True)
class Listed:
    """What is directly in a folder of a store."""

    name: str
    is_folder: bool
    size: int


@dataclass(frozen=True)
class Store:
    """The objects of one scheme, as this process reaches them; safe to use in threads, and again after a fork.

    Nothing that was listed is remembered. Errors are a FileNotFoundError, a FileExistsError, or a `StoreError`.
    """

    scheme: str
    retry: Retry = field(default_factory=default_retry)

    def mount(self, path: Located) -> Mount:
        """Return the filesystem of fsspec that has an object."""
        return mount_of(self.scheme, path.key)

    def read(self, path: Located) -> bytes:
        """Return the content of an object."""
        content: bytes = self._do("Reading", path, lambda fs, at: fs.cat_file(at))
        return content

    def read_range(self, path: Located, begin: int, end: int) -> bytes:
        """Return the bytes of an object from `begin` up to `end`, all of them."""

        def request(fs: AbstractFileSystem, at: str) -> bytes:
            content: bytes = fs.cat_file(at, start=begin, end=end)
            if len(content) != end - begin:  # a connection that was closed in the middle of a body
                raise OSError(f"got {len(content)} bytes instead of {end - begin}")
            return content

        return self._do("Reading", path, request) if begin < end else b""

    def copy_to(self, path: Located, file: Path, size: int) -> None:
        """Write the first `size` bytes of an object to a local file, which is made with its folders, or replaced."""
        file.parent.mkdir(parents=True, exist_ok=True)
        if self.scheme in READ_ONLY:  # in one request: the server may ignore ranges
            self._do("Reading", path, lambda fs, at: fs.get_file(at, str(file)))
            return
        with file.open("wb") as target:
            for begin in range(0, size, PART):
                target.write(self.read_range(path, begin, min(begin + PART, size)))

    def write(self, path: Located, data: bytes) -> None:
        """Write an object, which appears whole and replaces an older one."""
        self._do("Writing", path, lambda fs, at: fs.pipe_file(at, bytes(data)))

    def write_if_absent(self, path: Located, data: bytes) -> bool:
        """Write an object if there is none of this name; return whether it was written.

        S3, Google and Azure decide that in one step. Where a store does not (some that only resemble S3), it is asked
        first whether there is one, and read afterwards: two that write in the same instant could both be told True.
        """

        def request(fs: AbstractFileSystem, at: str) -> bool:
            if fs.exists(at):
                return self._holds(fs, at, data)  # a lost answer: the try before has written it
            try:
                fs.pipe_file(at, bytes(data), mode="create")
            except FileExistsError:
                return self._holds(fs, at, data)
            except OSError as error:
                if "PreconditionFailed" in str(error) or "ConditionNotMet" in str(error):
                    return self._holds(fs, at, data)
                raise
            return self._holds(fs, at, data)

        return self._do("Writing", path, request)

    @staticmethod
    def _holds(fs: AbstractFileSystem, at: str, data: bytes) -> bool:
        try:
            return bool(fs.cat_file(at) == bytes(data))
        except FileNotFoundError:
            return False

    def size(self, path: Located) -> int | None:
        """Return the bytes of an object; None if there is none of this name."""

        def request(fs: AbstractFileSystem, at: str) -> int | None:
            info = fs.info(at)
            return int(info["size"] or 0) if info.get("type") == "file" else None

        try:
            return self._do("Looking for", path, request)
        except FileNotFoundError:
            return None

    def exists(self, path: Located) -> bool:
        """Return whether there is an object of this name."""
        return self.size(path) is not None

    def list(self, folder: Located, limit: int | None = None) -> Sequence[Listed]:
        """Return what is directly in a folder, sorted by name; nothing if it does not exist."""

        def request(fs: AbstractFileSystem, at: str) -> list[Listed]:
            found = fs.ls(at, detail=True)
            return sorted((_make_entry(info) for info in found if _is_inside(info, at)), key=lambda one: one.name)

        try:
            return self._do("Listing", folder, request)[:limit]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def check_bucket(self, folder: Located) -> None:
        """Check that the bucket of a folder is there, where a scheme has buckets.

        Raises:
            FileNotFoundError: if it is not.
        """
        if self.scheme in _WITH_BUCKETS:
            mount = self.mount(folder)
            self._call(f"Looking for {folder}", lambda: mount.fs.info(mount.path(mount.head)))

    def find(self, folder: Located) -> dict[str, int]:
        """Return the keys of all objects below a folder, at any depth, with their bytes."""
        return {key: int(info["size"] or 0) for key, info in self._infos(folder).items()}

    def versions(self, folder: Located) -> dict[str, str]:
        """Return what a store says of the content of all objects below a folder: their sizes and tags or times.

        The text is empty for an object of which nothing but the size is known.
        """
        return {key: _version_of_object(info) for key, info in self._infos(folder).items()}

    def _infos(self, folder: Located) -> dict[str, Mapping[str, Any]]:
        def request(fs: AbstractFileSystem, at: str) -> dict[str, Mapping[str, Any]]:
            mount = self.mount(folder)
            return {mount.key(name): info for name, info in fs.find(at, detail=True).items() if name != at}

        try:
            return self._do("Listing", folder, request)
        except FileNotFoundError:
            return {}

    def delete(self, paths: Iterable[Located]) -> None:
        """Delete objects; those that are not there do not matter."""
        self._delete([path.key for path in paths])

    def delete_all(self, folder: Located) -> None:
        """Delete all objects below a folder."""
        self._delete(list(self.find(folder)))

    def _delete(self, keys: Sequence[str]) -> None:
        def request(some: Sequence[str]) -> None:
            mount = mount_of(self.scheme, some[0])
            found = [mount.path(key) for key in some]
            mount.fs.rm(found if len(found) > 1 else found[0])

        for begin in range(0, len(keys), _DELETED_AT_ONCE):
            some = keys[begin : begin + _DELETED_AT_ONCE]
            what = f"Deleting {self.scheme}://{some[0]}"
            try:
                self._call(what, functools.partial(request, some=some))
            except FileNotFoundError:  # a filesystem that stops at the first one that is missing
                for key in some if len(some) > 1 else ():
                    with suppress(FileNotFoundError):
                        self._call(what, functools.partial(request, some=[key]))

    def _do(self, verb: str, path: Located, request: Callable[[Any, str], T]) -> T:
        def call() -> T:
            mount = self.mount(path)
            return request(mount.fs, mount.path(path.key))

        return self._call(f"{verb} {path}", call)

    def _call(self, what: str, request: Callable[[], T]) -> T:
        return self.retry.call(what, request, lambda: forget_filesystem(self.scheme))


def in_parallel(work: Callable[[T], object], items: Sequence[T], threads: int = IN_FLIGHT) -> list[Any]:
    """Return what `work` returns for each item, several at a time; raise the first error once all have ended."""
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items)), thread_name_prefix="echelon-store") as pool:
        return [done.result() for done in [pool.submit(work, item) for item in items]]


@functools.cache
def store_of(scheme: str) -> Store:
    """Return the store of a scheme."""
    return Store(scheme)


def _version_of_object(info: Mapping[str, object]) -> str:
    known = [str(info[name]) for name in _VERSIONS if info.get(name)]
    return " ".join([str(info.get("size")), *known]) if known else ""


def _is_inside(info: dict[str, object], folder: str) -> bool:
    """Return whether an entry of a listing is below a folder: that of an object has the object itself."""
    return str(info["name"]).strip("/") != folder.strip("/")


def _make_entry(info: dict[str, Any]) -> Listed:
    name = str(info["name"]).rstrip("/").rpartition("/")[2]
    return Listed(name, info.get("type") == "directory", int(info.get("size") or 0))
