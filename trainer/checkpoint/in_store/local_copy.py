"""Local copies of objects that are read as files: a checkpoint in one file, or weights of another program."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ....common.storage import Pending, StorePath, Upload
from ....common.storage.store import PART


def local_copy(path: StorePath) -> Path:
    """Return a copy of an object as a local file of the same name; it is deleted when this process ends.

    Raises:
        FileNotFoundError: if there is no such object.
        OSError: if the temporary folder has no room, or the store does not answer.
    """
    size = path.store.size(path)
    if size is None:
        raise FileNotFoundError(f"{path} does not exist")
    file = _new_folder() / path.name
    path.store.copy_to(path, file, size)
    return file


def local_folder(path: StorePath) -> Path:
    """Return a copy of a folder of objects, as a local one that is deleted when this process ends.

    Raises:
        FileNotFoundError: if there is nothing.
        OSError: if the temporary folder has no room, or the store does not answer.
    """
    found = path.find()
    if not found:
        raise FileNotFoundError(f"{path} does not exist")
    folder = _new_folder()
    for one, size in found.items():
        path.store.copy_to(one, folder / one.relative_to(path), size)
    return folder


@contextmanager
def copy_out(path: StorePath, pending: Pending | None = None) -> Iterator[Path]:
    """Yield the name of a new local file, whose content becomes an object when the block ends without an error."""
    with tempfile.TemporaryDirectory(prefix="echelon-copy-") as folder:
        yield (file := Path(folder, path.name))
        with file.open("rb") as source, Upload(path, file.stat().st_size, pending) as upload:
            while block := source.read(PART):
                upload.write(block)
            upload.finish()


def _new_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="echelon-copy-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
