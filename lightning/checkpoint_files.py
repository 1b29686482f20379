"""Checkpoints for libraries that open them directly: their state under Lightning's names, or as a file in memory."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from ..strategies.errors import CheckpointError
from ..trainer import checkpoint
from ..trainer.module.load import as_hooks_see
from .torch_files import Source, is_foreign_file, read_torch_file


class CheckpointFiles:
    """An fsspec file system on which a checkpoint that is a folder opens as a file that ``torch.load`` reads, too."""

    def __init__(self, files: Any) -> None:
        self._files = files

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def open(self, path: str | Path, mode: str = "rb", **options: Any) -> Any:
        """Open a file as fsspec does, and a checkpoint as bytes in memory that hold only plain values and tensors."""
        if mode != "rb" or not Path(path).is_dir():
            return self._files.open(path, mode, **options)
        content = BytesIO()
        torch.save(load_checkpoint(path), content)
        content.seek(0)
        return content


def get_filesystem(path: str | Path, **options: Any) -> Any:
    """Return fsspec's file system for a path, which can also open checkpoints."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    return CheckpointFiles(url_to_fs(str(path), **options)[0])


def load_checkpoint(path: Source, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """Return the state of an Echelon checkpoint, under Lightning's names, or what another file holds, on the CPU.

    Raises:
        CheckpointError: if there is none, or it is damaged.
    """
    if is_foreign_file(path):
        return read_torch_file(path)
    folder = checkpoint.resolve(path)
    if folder is None:
        raise CheckpointError(f"path must be a checkpoint of Echelon, got {str(path)!r}; give the path of one.")
    return as_hooks_see(checkpoint.load(folder))
