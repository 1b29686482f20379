"""Saving: a state becomes safetensors and JSON, and last the manifest that makes it a checkpoint."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch

from ...strategies.errors import CheckpointError
from ...strategies.state.lazy_tensor import Block
from .atomic_folder import committed
from .encoding import TENSOR_TAGS, Encoder
from .files import FileRecord, write_bytes
from .manifest import LARGEST_JSON, MANIFEST, Manifest
from .safetensors_file import write_tensors

STATE: Final = "state.json"
MODEL: Final = "model"
"""The part whose tensors keep their plain names, so that others can read ``model.safetensors``."""


@dataclass(frozen=True)
class Snapshot:
    """What one rank has to write of a state."""

    values: Mapping[str, Any]
    """Per part everything but tensors, as JSON values; only rank 0's are written."""
    pieces: Mapping[str, Mapping[str, Block]]
    """Per part the tensors that this rank writes, by key."""
    entries: Mapping[str, Mapping[str, dict[str, Any]]]
    """Per part that differs between ranks: its `Sharded` mappings by place, which are inside `values`."""
    mesh: Mapping[str, int]
    own: Mapping[str, Collection[str]]
    """Per part the keys of those pieces that differ between ranks, or are blocks of what does."""
    replicas: Collection[int]
    """The ranks that hold the same blocks as this one, of which each writes some."""

    @property
    def is_shared(self) -> bool:
        """Whether other ranks have something to write; all ranks give the same answer."""
        return bool(self.entries)


@dataclass(frozen=True)
class Written:
    """The files that one rank has written: their records, and per part their names."""

    files: Mapping[str, FileRecord]
    parts: Mapping[str, Sequence[str]]


def save(path: str | Path, state: Mapping[str, Any], *, mesh: Mapping[str, int] | None = None) -> None:
    """Write `state` as a checkpoint folder at `path`, which exists whole or not at all.

    Top-level keys are parts, which can be loaded one by one. The tensors of the part ``model`` keep their names. An
    older checkpoint at `path` is replaced once the new one is complete.

    Raises:
        CheckpointError: before anything is written, for a value that a checkpoint cannot hold; or if the disk refuses.
    """
    write(Path(path), take(state, mesh))


def take(
    state: Mapping[str, Any],
    mesh: Mapping[str, int] | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    writes_common: bool | None = None,
) -> Snapshot:
    """Encode what this rank has to write of `state`; tensors are referred to, not copied.

    Args:
        state: parts by name.
        mesh: degrees of parallelism, for the manifest; default: those of the DTensors, and replicas of the rest.
        rank: this process; 0 writes all that is equal on all ranks.
        world_size: the number of processes.
        writes_common: whether this rank writes what is equal on all; by default, if it is rank 0.
    """
    is_first = rank == 0 if writes_common is None else writes_common
    encoders: dict[str, Encoder] = {}
    values: dict[str, Any] = {}
    for part, value in state.items():
        if not isinstance(part, str):
            raise CheckpointError(f"state has a part {part!r} of type {type(part).__name__}; name parts by strings.")
        encoders[part] = Encoder(is_first=is_first)
        values[part] = encoders[part].encode(value, f"state[{part!r}]", "" if part == MODEL else part)
    return Snapshot(
        values=values,
        pieces={part: encoder.pieces for part, encoder in encoders.items()},
        entries={part: encoder.entries for part, encoder in encoders.items() if encoder.is_shared},
        mesh=dict(mesh or _layout(encoders.values(), world_size)),
        own={part: encoder.own for part, encoder in encoders.items()},
        replicas={rank, *(other for encoder in encoders.values() for other in encoder.replicas)},
    )


def _layout(encoders: Iterable[Encoder], world_size: int) -> dict[str, int]:
    """Return the degrees of parallelism of the ranks that take a state."""
    found = {axis: degree for encoder in encoders for axis, degree in encoder.layout.items()}
    replicas = world_size // math.prod(found.values())
    return ({"dp_replicate": replicas} if replicas > 1 else {}) | found


def write(path: Path, snapshot: Snapshot) -> None:
    """Write a snapshot as the checkpoint folder `path`."""
    text = to_json(snapshot.values)
    with committed(path) as folder:
        finish(folder, snapshot, [write_own(folder, snapshot)], text)


def write_own(folder: Path, snapshot: Snapshot, rank: int = 0, world_size: int = 1) -> Written:
    """Write the tensors of this rank, a file a part."""
    files: dict[str, FileRecord] = {}
    parts: dict[str, list[str]] = {part: [] for part in snapshot.pieces}
    stems = stems_of(snapshot.pieces)
    for part, pieces in snapshot.pieces.items():
        if pieces:
            is_share = part in snapshot.entries and world_size > 1
            name = file_name(stems[part], rank, world_size) if is_share else file_name(stems[part])
            parts[part].append(name)
            files[name] = write_tensors(folder / name, pieces)
    return Written(files, parts)


def finish(folder: Path, snapshot: Snapshot, written: Sequence[Written], text: bytes | None = None) -> None:
    """Write what makes the files of all ranks, in order of rank, one checkpoint: ``state.json`` and the manifest."""
    files = {name: record for one in written for name, record in one.files.items()}
    files[STATE] = write_bytes(folder / STATE, to_json(snapshot.values) if text is None else text)
    parts = {part: [name for one in written for name in one.parts[part]] for part in snapshot.values}
    write_bytes(folder / MANIFEST, manifest_of(snapshot, parts, files).to_bytes())


def manifest_of(snapshot: Snapshot, parts: Mapping[str, Sequence[str]], files: Mapping[str, FileRecord]) -> Manifest:
    """Return the manifest of a snapshot, all of whose files are there; `parts` has the names of those of each part."""
    return Manifest(
        echelon_version=echelon_version(),
        torch_version=torch.__version__,
        saved_at=datetime.now(UTC).isoformat(timespec="microseconds"),
        mesh=snapshot.mesh,
        parts=parts,
        parameters=list(dict.fromkeys(_keys(snapshot.values.get(MODEL)))),
        files=files,
    )


def to_json(values: Mapping[str, Any]) -> bytes:
    """Return the text of ``state.json``.

    Raises:
        CheckpointError: if JSON cannot hold it, or it is too long.
    """
    try:
        text = json.dumps(values, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"The state cannot be written as JSON ({error}); store smaller plain values.") from None
    if len(text) > LARGEST_JSON:
        raise CheckpointError(
            f"The state has {len(text)} bytes of plain values, more than {LARGEST_JSON}; store long lists as tensors."
        )
    return text


def _keys(value: Any) -> Iterator[str]:
    """Give the keys of the tensors in an encoded value, in order."""
    if isinstance(value, list):
        for item in value:
            yield from _keys(item)
    elif isinstance(value, dict):
        tag = next(iter(value), "")
        if tag in TENSOR_TAGS:
            yield value[tag]
        else:
            for item in value.values():
                yield from _keys(item)


def file_name(stem: str, rank: int | None = None, world_size: int = 1) -> str:
    """Return the name of a part's file: that of one rank, or of all."""
    share = "" if rank is None else f"-{rank + 1:05d}-of-{world_size:05d}"
    return f"{stem}{share}.safetensors"


def stems_of(parts: Iterable[str]) -> dict[str, str]:
    """Return for each part how its files' names begin, made what every file system takes."""
    stems: dict[str, str] = {}
    known: set[str] = set()
    for part in parts:
        stem = re.sub(r"[^A-Za-z0-9_]", "_", part)[:100] or "_"
        names = (f"{stem}{number or ''}" for number in itertools.count())
        stems[part] = next(name for name in names if name.lower() not in known)
        known.add(stems[part].lower())
    return stems


@functools.cache
def echelon_version() -> str:
    """Return the installed version of Echelon."""
    try:
        return metadata.version("echelon")
    except metadata.PackageNotFoundError:  # a checkout on the path, not installed
        return "unknown"
