"""Probe of a store at the start of a run: an object is written, read and deleted, or an error says why not."""

from __future__ import annotations

import functools
import secrets
import threading
from typing import Final

from ..errors import ConfigError, EchelonError
from .filesystem import READ_ONLY
from .paths import StorePath
from .retry import Retry
from .store import Store

LIMIT: Final = 8.0
"""Seconds within which a store must answer at the start."""
_PROBING: Final = Retry(tries=3, seconds=LIMIT / 2)


def check_store(folder: StorePath, name: str = "default_root_dir", *, writes: bool = True) -> None:
    """Check that a folder of a store can be listed and, if it `writes`, written, read and deleted from.

    A bucket is not made: a typing error would otherwise be one more bucket.

    Raises:
        ConfigError: within 8 seconds, if the store does not answer, the bucket does not exist, or it is not permitted.
        MissingDependencyError: if the package for its scheme is not installed.
    """
    folder.store.mount(folder)  # its errors name the package, and belong to the caller's thread
    if writes and folder.scheme in READ_ONLY:
        raise ConfigError(
            f"{name}={str(folder)!r} can only be read; write to a local folder or a bucket (s3://, gs://, az://), and "
            "give such a URL as ckpt_path."
        )
    failures: list[BaseException] = []
    work = functools.partial(_probe_folder, folder, failures, writes=writes)
    # a daemon, since a client that waits for a silent endpoint cannot be stopped
    thread = threading.Thread(target=work, name="echelon-probe", daemon=True)
    thread.start()
    thread.join(LIMIT)
    where = f"{name}={str(folder)!r}"
    if thread.is_alive():
        raise ConfigError(
            f"{where} does not answer within {LIMIT:.0f} s; check the endpoint (AWS_ENDPOINT_URL for S3), the network "
            "and the region."
        )
    for failure in failures:
        if isinstance(failure, FileNotFoundError):
            bucket = folder.key.lstrip("/").split("/", 1)[0]
            raise ConfigError(
                f"{where} is in the bucket {bucket!r}, which does not exist; make it, or correct its name."
            ) from None
        if isinstance(failure, EchelonError):
            raise ConfigError(f"{where} cannot be used; check what it says: {failure}") from None
        raise failure


def _probe_folder(folder: StorePath, failures: list[BaseException], *, writes: bool) -> None:
    store = Store(folder.scheme, _PROBING)
    try:
        if not writes:
            store.check_bucket(folder)
            return
        path, content = folder / f".probe-{secrets.token_hex(8)}", b"echelon"
        store.write(path, content)
        found = store.read(path)
        store.delete([path])
        if found != content:
            raise ConfigError(
                f"{path} was written with {content!r} and read as {found!r}; use a store that returns what was written."
            )
    except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
        failures.append(error)
