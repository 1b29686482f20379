"""Filesystems of fsspec, one for each scheme and host in each process, imported when a URL is first used."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ..errors import ConfigError, MissingDependencyError, StoreError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_PACKAGES: Final[Mapping[str, str]] = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "hdfs": "pyarrow",
    "http": "aiohttp",
    "https": "aiohttp",
    "oci": "ocifs",
    "hf": "huggingface_hub",
    "sftp": "paramiko",
    "ssh": "paramiko",
}
"""The package to install for a scheme."""

_OPTIONS: Final[Mapping[str, Mapping[str, object]]] = {
    # botocore waits 60 s for a connection and tries 5 times, and s3fs 5 times each of these: our own retries have a
    # stated limit instead
    "s3": {"config_kwargs": {"connect_timeout": 5, "read_timeout": 30, "retries": {"max_attempts": 1}}},
}
"""Arguments of the filesystem of a scheme, unless fsspec's config has its own."""

READ_ONLY: Final = frozenset({"http", "https"})
"""Schemes of which objects can only be read; folders are pages of links."""


@dataclass(frozen=True)
class Mount:
    """A filesystem of fsspec, and the paths that it has for the objects of a URL.

    They are what fsspec makes of the URL: of S3's the bucket and the key, of HTTP's all of it; a host, as of HDFS, is
    an argument of the filesystem, and no part of its paths.
    """

    fs: AbstractFileSystem
    head: str
    """The first part of the keys below which it is: a bucket or a host."""
    base: str
    """What stands for `head` in its paths: ``bucket/``, ``/``, ``http://host/``."""

    def path(self, key: str) -> str:
        """Return the path of a key, such as ``bucket/folder/name``."""
        rest = key[len(self.head) :].lstrip("/")
        return f"{self.base}{rest}" if rest else self.base.rstrip("/") or self.base

    def key(self, path: str) -> str:
        """Return the key of a path."""
        rest = path.removeprefix(self.base).strip("/")
        return f"{self.head}/{rest}" if rest else self.head


def known_schemes() -> Collection[str]:
    """Return the schemes that fsspec knows, those that a program has registered included.

    Raises:
        MissingDependencyError: if fsspec is not installed.
    """
    try:
        from fsspec.registry import known_implementations, registry
    except ImportError as error:
        raise MissingDependencyError(
            f"A URL as a path needs the package fsspec ({error}); run: pip install fsspec"
        ) from error
    return {*known_implementations, *registry}


def mount_of(scheme: str, key: str) -> Mount:
    """Return the filesystem of this process for what a scheme has under a key, which begins with a bucket or a host.

    It keeps no listings, and is not that of the parent process: the client's connections do not survive a fork.

    Raises:
        MissingDependencyError: if the package for the scheme is not installed.
        StoreError: if the client cannot be made.
    """
    return _mount_in_process(scheme, key.split("/", 1)[0], os.getpid())


def forget_filesystem(scheme: str) -> None:
    """Make the next call connect anew, with credentials as they are then."""
    _mount_in_process.cache_clear()
    _clients.clear()


_clients: Final[dict[tuple[int, str, str], object]] = {}
"""Those of this process, by scheme and options: all buckets share one, and each host has its own."""


@functools.cache
def _mount_in_process(scheme: str, head: str, pid: int) -> Mount:
    made, path = _make_filesystem(scheme, f"{scheme}://{head}/x")
    client = _clients.setdefault((pid, scheme, repr(sorted(made.storage_options.items()))), made)
    if scheme in READ_ONLY:
        from .web_files import WebFiles

        client = WebFiles(client)
    return Mount(client, head, path[:-1])


def _make_filesystem(scheme: str, url: str) -> tuple[Any, str]:
    """Return a new filesystem for a URL, and the path that it has for it."""
    try:
        from fsspec.config import conf
        from fsspec.core import url_to_fs
        from fsspec.registry import get_filesystem_class
    except ImportError as error:
        raise MissingDependencyError(
            f"{scheme}:// needs the package fsspec ({error}); run: pip install fsspec"
        ) from error
    try:
        get_filesystem_class(scheme)
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        install = f"run: pip install {package}" if package else "install the package that it names"
        raise MissingDependencyError(
            f"{scheme}:// needs a package that is not installed ({error}); {install}"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{scheme}:// is not known to fsspec ({error}); install what implements it.") from None
    options = {**_OPTIONS.get(scheme.removesuffix("a"), {}), **conf.get(scheme, {})}
    try:
        made, path = url_to_fs(url, skip_instance_cache=True, use_listings_cache=False, **options)
    except Exception as error:
        raise StoreError(
            f"The client of {scheme}:// could not be made ({type(error).__name__}: {error}); check its settings in "
            "the environment and in fsspec's config."
        ) from error
    if hasattr(made, "retries"):
        made.retries = 1  # s3fs repeats each request five times: one that is never answered would take 300 s
    return made, path
