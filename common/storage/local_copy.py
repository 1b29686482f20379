"""Local copies of objects that programs read or write as files: one checkpoint, weights of others, configs, figures."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from .paths import AnyPath, StorePath
from .pending import Pending
from .store import PART, in_parallel
from .upload import Upload


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
        _upload_file(file, path, pending)


def at_hand(path: AnyPath) -> Path:
    """Return a local file as it is, and a copy of an object, as `local_copy` does."""
    return local_copy(path) if isinstance(path, StorePath) else path


@contextmanager
def writing_local_file(path: AnyPath) -> Iterator[Path]:
    """Yield a local path as it is, and for an object the name of a new local file, as `copy_out` does."""
    if isinstance(path, StorePath):
        with copy_out(path) as file:
            yield file
    else:
        yield path


def send_folder(folder: Path, path: StorePath, last: Collection[str], *, is_all: bool = True) -> None:
    """Write the files below a local folder as objects, those named in `last` when all others are there.

    If it `is_all` that belongs below `path`, those that were there before and other objects are deleted first: no
    reader takes them for the new ones.
    """
    found = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}
    if is_all:
        before = list(path.find())
        path.store.delete([one for one in before if one.name in last])
        path.store.delete([one for one in before if one.relative_to(path).as_posix() not in found])

    def send(name: str) -> None:
        _upload_file(found[name], path / name)

    is_last = {name: name.rpartition("/")[2] in last for name in found}
    for name in [name for name in found if not is_last[name]]:  # each is sent by several threads
        send(name)
    in_parallel(send, [name for name in found if is_last[name]])


def _upload_file(file: Path, path: StorePath, pending: Pending | None = None) -> None:
    with file.open("rb") as source, Upload(path, file.stat().st_size, pending) as upload:
        while block := source.read(PART):
            upload.write(block)
        upload.finish()


def _new_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="echelon-copy-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
