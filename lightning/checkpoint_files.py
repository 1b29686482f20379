"""Checkpoints for libraries that open them directly, and files of Lightning's and of torch.save for our classes.

What a file holds is read, and never run.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import IO, Any, TypeAlias, TypeGuard

import torch

from ..common.errors import CheckpointError
from ..common.storage import AnyPath, StorePath, any_path, as_path, at_hand
from ..strategies.state.regular_file import open_regular
from ..strategies.state.schema import format_as_line
from ..trainer import checkpoint
from ..trainer.checkpoint.manifest import is_checkpoint
from ..trainer.checkpoint.tags import ClassName, imported_class
from ..trainer.module.hparams_json import class_named
from ..trainer.module.load import as_hooks_see

__all__ = ["CheckpointFiles", "get_filesystem", "load_checkpoint"]

Source: TypeAlias = str | AnyPath | IO[bytes]
"""A file: its path, or an open one, such as a ``BytesIO``."""


# --- ours, for libraries ---


class CheckpointFiles:
    """An fsspec file system on which a checkpoint that is a folder opens as a file that ``torch.load`` reads, too."""

    def __init__(self, files: Any) -> None:
        self._files = files

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def open(self, path: str | Path, mode: str = "rb", **options: Any) -> Any:
        """Open a file as fsspec does, and a checkpoint as bytes in memory that hold only plain values and tensors."""
        if mode != "rb" or not as_path(path).is_dir():
            return self._files.open(path, mode, **options)
        content = BytesIO()
        torch.save(load_checkpoint(path), content)
        content.seek(0)
        return content


def get_filesystem(path: str | Path, **options: object) -> Any:
    """Return fsspec's file system for a path, which can also open checkpoints."""
    from fsspec.core import url_to_fs

    return CheckpointFiles(url_to_fs(str(path), **options)[0])


def load_checkpoint(path: Source, map_location: object = None, weights_only: bool | None = None) -> Any:
    """Return the state of an Echelon checkpoint, under Lightning's names, or what another file holds, on the CPU.

    Raises:
        CheckpointError: if there is none, or it is damaged.
    """
    if not is_own_path(path):
        return read_torch_file(path)
    folder = checkpoint.resolve_checkpoint(path)
    if folder is None:
        raise CheckpointError(f"path must be a checkpoint of Echelon, got {str(path)!r}; give the path of one.")
    return as_hooks_see(checkpoint.load(folder))


# --- others', for our classes ---


def is_own_path(source: Source) -> TypeGuard[str | AnyPath]:
    """Return whether this is neither an open file nor the path of one that is no checkpoint of Echelon's."""
    if not isinstance(source, str | os.PathLike | StorePath):
        return False
    path = as_path(source)
    return not path.is_file() or is_checkpoint(path)


def read_torch_file(source: Source, *, with_classes: bool = False, is_mapped: bool = False) -> Any:
    """Return what a file of ``torch.save`` holds, on the CPU.

    Args:
        source: the file.
        with_classes: whether it may refer to classes that are imported. Each becomes a `ClassName`, so that nothing in
            the file can call it.
        is_mapped: whether tensors stay in the file until they are used.

    Raises:
        CheckpointError: for other files, and those with objects other than tensors and plain values.
    """
    place = "The file" if not isinstance(source, str | os.PathLike | StorePath) else repr(str(source))
    try:
        file = at_hand(as_path(source)) if isinstance(source, str | os.PathLike | StorePath) else source
        if isinstance(file, Path):
            open_regular(file).close()  # a named pipe would make the reader wait
        with torch.serialization.safe_globals(_class_names(file) if with_classes else []):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=is_mapped)
    except Exception as error:  # a malicious file can make the reader raise anything
        if isinstance(error, OSError):
            raise
        raise CheckpointError(
            f"{place} must be a file of torch.save with tensors and plain values, found "
            f"{format_as_line(str(error).partition(chr(10))[0])}; save state_dicts, not objects, in it."
        ) from None


def read_checkpoint(source: Source, prefix: str = "") -> dict[str, Any]:
    """Return the state in a file of Lightning's, or of torch.save, as `load_from_checkpoint` takes it.

    Args:
        source: the file.
        prefix: ``datamodule_`` for the hyper-parameters of a data module.

    Raises:
        CheckpointError: for other files, and those without weights under ``state_dict``.
    """
    state = read_torch_file(source, with_classes=True)
    if not isinstance(state, dict) or not isinstance(state.get("state_dict"), Mapping):
        found = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise CheckpointError(
            f"The file must be a checkpoint with weights under 'state_dict', found {format_as_line(str(found))}; read "
            "it with torch.load, and call load_state_dict."
        )
    if isinstance(name := state.get(f"{prefix}hparams_name"), str):  # Lightning's name of it
        state.setdefault(f"{prefix}hyper_parameters_argument", name)
    old = next((key for key in ("hparams", "module_arguments") if key in state), None)  # of Lightning before 0.9
    if old is not None and not prefix:
        state.setdefault("hyper_parameters", state.pop(old))
    return state


def hyper_parameters(stored: Mapping[str, object], owner: type) -> dict[str, Any]:
    """Return hyper-parameters as a file holds them, with classes in place of their names.

    Raises:
        CheckpointError: for a class that they may not name; see `from_jsonable`.
    """
    return {name: _with_classes(value, owner) for name, value in stored.items()}


def _with_classes(value: Any, owner: type) -> object:
    if type(value) is ClassName:
        return class_named(value, owner)
    if type(value) in (list, tuple, set):
        return type(value)(_with_classes(item, owner) for item in value)
    if isinstance(value, dict):
        return type(value)((key, _with_classes(item, owner)) for key, item in value.items())
    return value


def _class_names(source: Path | IO[bytes]) -> list[Any]:
    """Return the classes that a file refers to, as torch takes them: an object that stands for each, and its name."""
    names: list[str] = []
    with suppress(ValueError, RuntimeError):  # not the format of torch.save: torch.load says so
        begin = None if isinstance(source, Path) else source.tell()
        try:
            names = torch.serialization.get_unsafe_globals_in_checkpoint(source)
        finally:
            if begin is not None:
                source.seek(begin)  # type: ignore[union-attr]
    return [(found, name) for name in names if (found := _imported_name(name)) is not None]


def _imported_name(path: str) -> ClassName | None:
    """Return the name of a class, given with dots only, if it is imported."""
    parts = path.split(".")
    places = (f"{'.'.join(parts[:count])}:{'.'.join(parts[count:])}" for count in range(len(parts) - 1, 0, -1))
    return next((ClassName(place) for place in places if imported_class(place) is not None), None)


class NotYetLoadedTensor:
    """The class of what Lightning's ``_lazy_load`` returns; here these are ordinary tensors, in mapped memory."""


def lazy_load(filename: str | Path) -> Any:
    """Return what a file of ``torch.save`` holds; the bytes of a tensor are read when they are used.

    Raises:
        FileNotFoundError: if there is no such file.
        CheckpointError: as `read_torch_file` does.
    """
    file = any_path("filename", filename)
    if not file.is_file():
        raise FileNotFoundError(f"{str(filename)!r} must be a file; give the path of one.")
    filename = at_hand(file)
    return read_torch_file(filename, is_mapped=zipfile.is_zipfile(filename))
