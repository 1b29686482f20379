"""Folders in a store: filled under a name of their own, and made a checkpoint by one object, its manifest.

A checkpoint ``x.ckpt`` has its files in ``x.ckpt/<id>/``, where the id is new for each save: two saves never mix, and
no name is used again while an older one is deleted. The object ``x.ckpt/manifest.json`` makes it a checkpoint: it names
the id, is written last, and is deleted first. The object ``.newest`` beside it names the checkpoint that was committed
last, for stores whose listings lag behind what was written.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from ....common.errors import CheckpointError
from ....common.storage import Pending, StorePath, copy_out
from ....common.storage.store import in_parallel
from ..manifest import MANIFEST, is_checkpoint, manifest_from, with_folder
from .links import link_target, write_link

NEWEST: Final = ".newest"


@contextmanager
def committed_to_store(path: StorePath, *, is_file: bool, pending: Pending | None = None) -> Iterator[StorePath | Path]:
    """Yield a folder to write to, and make it the checkpoint `path` when the block ends without an error.

    With `is_file`, yield the name of a new local file instead, whose content becomes the object.
    """
    before = _id_of_replaced(path)
    if is_file:
        with copy_out(path, pending) as file:
            yield file
        with suppress(OSError):
            write_link(path.parent / NEWEST, path)
        _delete_folder(path)
        return
    folder = path / secrets.token_hex(8)
    try:
        yield folder
        text = (folder / MANIFEST).read_bytes()
    except BaseException:
        with suppress(OSError):  # what is left is deleted by the next run that saves there
            folder.store.delete_all(folder)
        raise
    # after an error here the files stay: the store may have written the object although its answer was lost
    (path / MANIFEST).write_bytes(with_folder(manifest_from(text, str(folder / MANIFEST)), folder.name))
    with suppress(OSError):
        write_link(path.parent / NEWEST, path)
    with suppress(OSError):
        if path.is_file():  # a link, or a checkpoint in one file
            path.unlink()
        if before:
            folder.store.delete_all(path / before)


@contextmanager
def working_store_folder(path: StorePath) -> Iterator[StorePath]:
    """Yield a new folder beside `path`, which is deleted afterwards."""
    folder = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        yield folder
    finally:
        with suppress(OSError):
            folder.store.delete_all(folder)


def discard_stored(path: StorePath) -> None:
    """Delete a checkpoint: it is none once its manifest is gone; its files follow."""
    path.store.delete([path / MANIFEST, path])
    _delete_folder(path)


def list_checkpoints_in(folder: StorePath) -> list[StorePath]:
    """Return what is a checkpoint, or one in a single file, directly in a folder; no link, and nothing unfinished."""
    names = {entry.name for entry in folder.store.list(folder)}
    newest = link_target(folder / NEWEST)
    if newest is not None and newest.parent == folder:
        names.add(newest.name)
    paths = [folder / name for name in sorted(names) if not (name.startswith(".") or _is_id(name))]
    return [path for path, is_one in zip(paths, in_parallel(is_checkpoint, paths, threads=16), strict=True) if is_one]


def list_link_targets(folder: StorePath) -> list[StorePath]:
    """Return what links directly in a folder point to."""
    entries = [folder / entry.name for entry in folder.store.list(folder) if not entry.is_folder]
    targets = [link_target(path) for path in entries if not path.name.startswith(".")]
    return [target for target in targets if isinstance(target, StorePath)]


def begun_in(folder: StorePath) -> list[StorePath]:
    """Return the places directly in a folder where saves were begun that have not made a checkpoint."""
    inside = [folder / entry.name for entry in folder.store.list(folder) if entry.is_folder]
    return [path for path in inside if path.suffix == ".ckpt" and not is_checkpoint(path)]


def sweep_stored(folder: StorePath) -> Sequence[StorePath]:
    """Delete what saves left in a folder whose manifest never came, and half of what is deleted; return the places.

    Only for a run that holds the folder: the save of another one may be about to put its manifest.
    """
    swept = []
    for path in [folder / entry.name for entry in folder.store.list(folder) if entry.is_folder]:
        inside = folder.store.list(path)
        ids = [entry.name for entry in inside if entry.is_folder and _is_id(entry.name)]
        try:
            current = manifest_from((path / MANIFEST).read_bytes(), str(path)).folder
        except FileNotFoundError:
            current = ""
        except CheckpointError:  # damaged: it is listed as such, and left for whoever looks at it
            continue
        for name in ids:
            if name != current:
                folder.store.delete_all(path / name)
                swept.append(path / name)
        if path.name.startswith(".") and _is_id(path.name.rpartition(".")[2]):
            folder.store.delete_all(path)
            swept.append(path)
    return swept


def _is_id(name: str) -> bool:
    return len(name) == 16 and set(name) <= set("0123456789abcdef")


def _id_of_replaced(path: StorePath) -> str:
    """Return the id of the checkpoint that is replaced; empty without one.

    Raises:
        CheckpointError: if something else is there.
    """
    try:
        text = (path / MANIFEST).read_bytes()
    except FileNotFoundError:
        if path.is_file() and link_target(path) is None and not is_checkpoint(path):
            raise CheckpointError(
                f"{path} exists and is not a checkpoint, so it is not overwritten; choose another name."
            ) from None
        return ""
    try:
        return manifest_from(text, str(path)).folder
    except CheckpointError:
        return ""


def _delete_folder(path: StorePath) -> None:
    found = path.find()
    first = [one for one in found if one.name == MANIFEST]
    path.store.delete(first)
    path.store.delete([one for one in found if one.name != MANIFEST])
