"""StorePath: the URL of an object or a folder in a store, which answers what a `pathlib.Path` does."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Final, Self, TypeAlias

from ..errors import ConfigError, did_you_mean
from ..local_path import local_path
from .filesystem import known_schemes
from .store import Store, store_of

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/{1,2}(.*)", re.DOTALL)
"""One slash is what is left of two when a program has passed a URL through `pathlib`."""


def is_url(path: object) -> bool:
    """Return whether a path, or its text, is a URL; a Windows drive is none."""
    return isinstance(path, StorePath) or _URL.match(str(path)) is not None


@dataclass(frozen=True)
class StorePath:
    """The URL of an object, or of a folder of objects: a value that can be joined, compared, pickled and printed.

    It answers what code asks of a `pathlib.Path`, but it is none: ``open(path)`` and functions of ``os`` raise a
    TypeError instead of making a local folder named ``s3:``.
    """

    scheme: str
    key: str
    """The path below the scheme, with the bucket first; without a slash at the end."""

    @classmethod
    def parse(cls, url: str, name: str = "path") -> Self:
        """Return the path of a URL that the argument called `name` has.

        Raises:
            ConfigError: for a scheme that fsspec does not know, for credentials in it, and for a query or a fragment.
        """
        match = _URL.match(url)
        if match is None:
            raise ConfigError(f"{name} must be a URL, got {url!r}; write it as s3://bucket/folder.")
        scheme, rest = match[1].lower(), match[2]
        if "@" in rest.split("/", 1)[0] and scheme not in _WITH_AT:
            raise ConfigError(
                f"{name}={scheme}://...@... has credentials in the URL, which logs and checkpoints would show; leave "
                "them out, and set them in the environment, in the client's own config file or in fsspec's."
            )
        for mark, kind in (("?", "query"), ("#", "fragment")):
            if mark in rest:
                shown = f"{scheme}://{rest.split(mark, 1)[0]}"
                raise ConfigError(
                    f"{name}={shown!r} is followed by a {kind} ({mark}...), which no object of a store has; leave it "
                    "out, and set options of the client in fsspec's config."
                )
        _check_scheme(scheme, f"{scheme}://{rest}", name)
        parts = [part for part in rest.split("/") if part not in ("", ".")]
        if ".." in parts or (not parts and scheme not in _WITHOUT_BUCKET):
            raise ConfigError(
                f"{name}={url!r} names no bucket or has '..' in it; write it as {scheme}://bucket/folder."
            )
        is_rooted = scheme in _ROOTED
        return cls(scheme, ("/" if is_rooted else "") + "/".join(parts))

    def __str__(self) -> str:
        return f"{self.scheme}://{self.key}"

    def __truediv__(self, other: str | PurePosixPath) -> Self:
        parts = [part for part in str(other).split("/") if part not in ("", ".")]
        return type(self)(self.scheme, "/".join([self.key, *parts] if self.key else parts))

    def joinpath(self, *others: str) -> Self:
        """Return this path with others appended."""
        return self / "/".join(others)

    @property
    def store(self) -> Store:
        """The store in which it is."""
        return store_of(self.scheme)

    # --- its names ---------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The last part."""
        return self.key.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The extension of the name, with its dot."""
        return PurePosixPath(self.name).suffix

    @property
    def stem(self) -> str:
        """The name without its extension."""
        return PurePosixPath(self.name).stem

    @property
    def parts(self) -> tuple[str, ...]:
        """The scheme, the bucket, and the names of the folders."""
        return f"{self.scheme}://", *self.key.split("/")

    @property
    def parent(self) -> Self:
        """The folder that holds it; a bucket is its own."""
        above, slash, _ = self.key.rpartition("/")
        return type(self)(self.scheme, above) if slash and above else self

    @property
    def parents(self) -> tuple[Self, ...]:
        """The folders above it, from the nearest to the bucket."""
        found, here = [], self
        while here.parent != here:
            here = here.parent
            found.append(here)
        return tuple(found)

    def with_name(self, name: str) -> Self:
        """Return the path with another last part."""
        return self.parent / name

    def relative_to(self, other: object) -> PurePosixPath:
        """Return the part below another path.

        Raises:
            ValueError: if it is not below.
        """
        base = str(other).rstrip("/")
        if str(self) != base and not str(self).startswith(f"{base}/"):
            raise ValueError(f"{str(self)!r} is not below {base!r}; give a path above it.")
        return PurePosixPath(str(self)[len(base) + 1 :])

    def is_relative_to(self, other: object) -> bool:
        """Return whether it is another path, or below it."""
        return str(self) == str(other).rstrip("/") or str(self).startswith(f"{str(other).rstrip('/')}/")

    def absolute(self) -> Self:
        """Return itself: a URL depends on no working folder."""
        return self

    def resolve(self, strict: bool = False) -> Self:
        """Return itself: a store has no links."""
        return self

    def expanduser(self) -> Self:
        """Return itself."""
        return self

    # --- what is there -----------------------------------------------------------------------------------------------

    def is_file(self) -> bool:
        """Return whether there is an object of this name."""
        return self.store.size(self) is not None

    def is_dir(self) -> bool:
        """Return whether there are objects below it."""
        return bool(self.store.list(self, limit=1))

    def exists(self) -> bool:
        """Return whether there is an object of this name, or one below it."""
        return self.is_file() or self.is_dir()

    def is_symlink(self) -> bool:
        """Return False: a store has no links."""
        return False

    def lstat(self) -> object:
        """Return something if it is there.

        Raises:
            FileNotFoundError: if it is not.
        """
        if not self.exists():
            raise FileNotFoundError(f"{self} does not exist")
        return self

    def iterdir(self) -> Iterator[Self]:
        """Yield what is directly in the folder, sorted by name."""
        for entry in self.store.list(self):
            yield self / entry.name

    def glob(self, pattern: str) -> Iterator[Self]:
        """Yield the paths below it whose parts match those of a pattern, which has no ``**``."""
        first, _, rest = pattern.partition("/")
        has_wildcard = any(mark in first for mark in "*?[")
        names = [entry.name for entry in self.store.list(self)] if has_wildcard else [first]
        for name in names:
            if fnmatchcase(name, first):
                if rest:
                    yield from (self / name).glob(rest)
                elif has_wildcard or (self / name).exists():
                    yield self / name

    def read_bytes(self) -> bytes:
        """Return the content of an object."""
        return self.store.read(self)

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return the content of an object as text."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, data: bytes) -> None:
        """Write an object, which appears whole."""
        self.store.write(self, data)

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        """Write an object, which appears whole."""
        self.write_bytes(text.encode(encoding))

    def find(self) -> dict[Self, int]:
        """Return all objects below it, at any depth, with their bytes."""
        return {type(self)(self.scheme, key): size for key, size in self.store.find(self).items()}

    def unlink(self, missing_ok: bool = True) -> None:
        """Delete an object, if it is there."""
        self.store.delete([self])

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: a folder is there once it holds an object."""


AnyPath: TypeAlias = Path | StorePath

_WITHOUT_BUCKET: Final = frozenset({"memory", "file", "local"})
_ROOTED: Final = frozenset({"file", "local", "memory"})
_WITH_AT: Final = frozenset({"abfs", "abfss"})
"""Where ``container@account`` is the name of a place."""


def as_path(path: str | os.PathLike[str] | StorePath) -> AnyPath:
    """Return the path of a text: a `StorePath` of a URL, otherwise a `pathlib.Path`."""
    if isinstance(path, StorePath):
        return path
    return StorePath.parse(str(path)) if is_url(path) else Path(path)


def any_path(name: str, path: str | os.PathLike[str] | StorePath) -> AnyPath:
    """Return the path in the argument called `name`: a URL is checked, and ``~`` is expanded in a local one.

    Raises:
        ConfigError: for a URL that is not possible, and for letters that no local file can have.
    """
    if isinstance(path, StorePath):
        return path
    return StorePath.parse(str(path), name) if is_url(path) else local_path(name, Path(path))


def _check_scheme(scheme: str, url: str, name: str) -> None:
    known = known_schemes()
    if scheme in known:
        return
    shortened = ("s3", "gs", "az", "abfs", "hdfs", "http", "https", "memory", "file", *known)
    raise ConfigError(
        f"{name}={url!r} has the scheme {scheme!r}, which fsspec does not know.{did_you_mean(scheme, shortened[:8])}"
    )
