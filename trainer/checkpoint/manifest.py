"""The manifest lists the files of a checkpoint; it is written last and protected by its own hash."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ...strategies.errors import CheckpointError
from .files import HASH_NAME, FileRecord, explain

MANIFEST: Final = "manifest.json"
FORMAT: Final = "echelon-checkpoint"
FORMAT_VERSION: Final = 1

LARGEST_JSON: Final = 256 << 20
"""Bytes; a larger file is not parsed."""

_BEFORE_HASH: Final = b',\n "sha256": "'
_AFTER_HASH: Final = b'"\n}\n'
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]*")


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``."""

    echelon_version: str
    torch_version: str
    saved_at: str
    """UTC, ISO 8601 with microseconds: sorts as text."""
    mesh: Mapping[str, int]
    """The degrees of parallelism of the run; empty for one process."""
    parts: Mapping[str, Sequence[str]]
    """For each top-level key of the state, the files with its tensors; its other values are in ``state.json``."""
    parameters: Sequence[str]
    """The names of the model's tensors."""
    files: Mapping[str, FileRecord]

    def to_bytes(self) -> bytes:
        """Return the text of the file; its last line is the hash of all before it."""
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "echelon_version": self.echelon_version,
            "torch_version": self.torch_version,
            "saved_at": self.saved_at,
            "mesh": dict(self.mesh),
            "parts": {part: list(names) for part, names in self.parts.items()},
            "files": {name: {"size": file.size, "sha256": file.sha256} for name, file in self.files.items()},
            "parameters": list(self.parameters),
        }
        head = json.dumps(content, indent=1).encode().removesuffix(b"\n}")
        return head + _BEFORE_HASH + hashlib.new(HASH_NAME, head).hexdigest().encode() + _AFTER_HASH


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint folder.

    Raises:
        CheckpointError: if it is absent, damaged, or of an unknown version of the format.
    """
    path = folder / MANIFEST
    try:
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder} is not a checkpoint folder{'' if folder.exists() else ': it does not exist'}; give another."
            )
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; the checkpoint is not complete, use another one.")
        if path.stat().st_size > LARGEST_JSON:
            raise CheckpointError(
                f"{path} has {path.stat().st_size} bytes, more than any manifest; use another checkpoint."
            )
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {explain(error)}.") from error
    head, hash_ = _split(raw)
    if head is None or hashlib.new(HASH_NAME, head).hexdigest() != hash_:
        raise CheckpointError(
            f"{path} is damaged: its content does not match its own {HASH_NAME}; use another checkpoint."
        )
    try:
        return _parse(json.loads(head + b"\n}"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not what Echelon writes ({error!r}); use another checkpoint.") from None


def _split(raw: bytes) -> tuple[bytes | None, str]:
    tail = len(_BEFORE_HASH) + 64 + len(_AFTER_HASH)
    head, end = raw[:-tail], raw[-tail:]
    if not (end.startswith(_BEFORE_HASH) and end.endswith(_AFTER_HASH)):
        return None, ""
    return head, end[len(_BEFORE_HASH) : -len(_AFTER_HASH)].decode("ascii", "replace")


def _parse(content: dict[str, Any]) -> Manifest:
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']!r}")
    if content["format_version"] != FORMAT_VERSION:
        raise CheckpointError(
            f"The checkpoint has format version {content['format_version']!r}, this Echelon reads {FORMAT_VERSION}; "
            f"read it with Echelon {content['echelon_version']}, which wrote it."
        )
    files = {name: FileRecord(int(file["size"]), str(file["sha256"])) for name, file in content["files"].items()}
    parts = {part: list(names) for part, names in content["parts"].items()}
    for name in [*files, *(name for names in parts.values() for name in names)]:
        if not _FILE_NAME.fullmatch(name) or name not in files:
            raise CheckpointError(
                f"manifest.json names a file {name!r}, which cannot be part of a checkpoint; use another one."
            )
    return Manifest(
        echelon_version=str(content["echelon_version"]),
        torch_version=str(content["torch_version"]),
        saved_at=str(content["saved_at"]),
        mesh={str(axis): int(degree) for axis, degree in content["mesh"].items()},
        parts=parts,
        parameters=[str(name) for name in content["parameters"]],
        files=files,
    )
