"""Filesystems of fsspec, one for each scheme in each process, imported when a URL is first used."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Mapping
from typing import Any, Final

from ..errors import ConfigError, MissingDependencyError, StoreError

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

_OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    # botocore waits 60 s for a connection and tries 5 times, and s3fs 5 times each of these: our own retries have a
    # stated limit instead
    "s3": {"config_kwargs": {"connect_timeout": 5, "read_timeout": 30, "retries": {"max_attempts": 1}}},
}
"""Arguments of the filesystem of a scheme, unless fsspec's config has its own."""


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


def filesystem(scheme: str) -> Any:
    """Return the filesystem of this process for a scheme.

    It keeps no listings, and is not that of the parent process: the client's connections do not survive a fork.

    Raises:
        MissingDependencyError: if the package for the scheme is not installed.
        StoreError: if the client cannot be made.
    """
    return _of_process(scheme, os.getpid())


def forget_filesystem(scheme: str) -> None:
    """Make the next call connect anew, with credentials as they are then."""
    _of_process.cache_clear()


@functools.cache
def _of_process(scheme: str, pid: int) -> Any:
    try:
        from fsspec.config import conf
        from fsspec.registry import get_filesystem_class
    except ImportError as error:
        raise MissingDependencyError(
            f"{scheme}:// needs the package fsspec ({error}); run: pip install fsspec"
        ) from error
    try:
        kind = get_filesystem_class(scheme)
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
        made = kind(skip_instance_cache=True, use_listings_cache=False, **options)
    except Exception as error:
        raise StoreError(
            f"The client of {scheme}:// could not be made ({type(error).__name__}: {error}); check its settings in "
            "the environment and in fsspec's config."
        ) from error
    if hasattr(made, "retries"):
        made.retries = 1  # s3fs repeats each request five times: one that is never answered would take 300 s
    return made
