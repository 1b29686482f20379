"""Saving: a state becomes safetensors and JSON, and last the manifest that makes it a checkpoint."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ...strategies.errors import CheckpointError
from .commit import committed
from .disk import FileRecord, write_bytes
from .manifest import LARGEST_JSON, MANIFEST, Manifest
from .tensors import Piece, write_tensors
from .values import encode

STATE: Final = "state.json"
MODEL: Final = "model"
"""The part whose tensors keep their plain names, so that others can read ``model.safetensors``."""


@dataclass(frozen=True)
class Snapshot:
    """A state, ready to be written: JSON as text, and per part the tensors by key."""

    text: bytes
    tensors: Mapping[str, Mapping[str, Tensor]]
    mesh: Mapping[str, int]


def save(path: str | Path, state: Mapping[str, Any], *, mesh: Mapping[str, int] | None = None) -> None:
    """Write `state` as a checkpoint folder at `path`, which exists whole or not at all.

    Top-level keys are parts, which can be loaded one by one. The tensors of the part ``model`` keep their names. An
    older checkpoint at `path` is replaced once the new one is complete.

    Raises:
        CheckpointError: before anything is written, for a value that a checkpoint cannot hold; or if the disk refuses.
    """
    write(Path(path), take(state, mesh))


def take(state: Mapping[str, Any], mesh: Mapping[str, int] | None = None) -> Snapshot:
    """Encode `state`; tensors are referred to, not copied."""
    encoded: dict[str, Any] = {}
    tensors: dict[str, dict[str, Tensor]] = {}
    for part, value in state.items():
        if not isinstance(part, str):
            raise CheckpointError(f"state has a part {part!r} of type {type(part).__name__}; name parts by strings.")
        encoded[part], tensors[part] = encode(value, f"state[{part!r}]", "" if part == MODEL else part)
    try:
        text = json.dumps(encoded, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"The state cannot be written as JSON ({error}); store smaller plain values.") from None
    if len(text) > LARGEST_JSON:
        raise CheckpointError(
            f"The state has {len(text)} bytes of plain values, more than {LARGEST_JSON}; store long lists as tensors."
        )
    return Snapshot(text, tensors, dict(mesh or {}))


def write(path: Path, snapshot: Snapshot) -> None:
    """Write a snapshot as the checkpoint folder `path`."""
    with committed(path) as folder:
        files: dict[str, FileRecord] = {}
        parts: dict[str, list[str]] = {}
        for part, tensors in snapshot.tensors.items():
            parts[part] = [_file_name(part, files)] if tensors else []
            for name in parts[part]:
                pieces = {key: Piece(tensor, (0,) * tensor.dim()) for key, tensor in tensors.items()}
                files[name] = write_tensors(folder / name, pieces)
        files[STATE] = write_bytes(folder / STATE, snapshot.text)
        manifest = Manifest(
            echelon_version=echelon_version(),
            torch_version=torch.__version__,
            saved_at=datetime.now(UTC).isoformat(timespec="microseconds"),
            mesh=snapshot.mesh,
            parts=parts,
            parameters=list(snapshot.tensors.get(MODEL, {})),
            files=files,
        )
        write_bytes(folder / MANIFEST, manifest.to_bytes())


def _file_name(part: str, taken: Iterable[str]) -> str:
    """Return ``<part>.safetensors``, made a name that every file system takes."""
    stem = re.sub(r"[^A-Za-z0-9_]", "_", part)[:100] or "_"
    names = (f"{stem}{number or ''}.safetensors" for number in itertools.count())
    known = {name.lower() for name in taken}
    return next(name for name in names if name.lower() not in known)


def echelon_version() -> str:
    """Return the installed version of Echelon."""
    try:
        return metadata.version("echelon")
    except metadata.PackageNotFoundError:  # a checkout on the path, not installed
        return "unknown"
