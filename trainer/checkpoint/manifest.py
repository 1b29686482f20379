"""Manifest: the list of a checkpoint's files, or of the pieces of its one file; written last, with its own hash."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import re
import stat
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

from ...common.errors import CheckpointError
from ...common.storage import AnyPath, FetchedFile, StorePath
from ...strategies.state.schema import (
    COUNT,
    LINEAGE,
    POSITIVE,
    TEXT,
    TIME,
    check_schema,
    format_as_line,
    parse_json,
    text_like,
    time_text,
)
from .files import HASH_NAME, FilePiece, FileRecord, MappedFile, explain_os_error, is_one_file
from .in_store.links import link_target
from .on_nodes.parts import FILE_NAME, NODES, NodePart

MANIFEST: Final = "manifest.json"
STATE: Final = "state.json"
"""The file with every value that is not a tensor."""
TENSORS: Final = "tensors.json"
"""The piece of a checkpoint in one file that has the place, shape and dtype of each tensor."""
FORMAT: Final = "echelon-checkpoint"
FORMAT_VERSION: Final = 1

LARGEST_JSON: Final = 256 << 20
"""Bytes; a larger file is not parsed."""

ROOT: Final = "echelon"
"""The folder in which a checkpoint in one file, a zip file, has its members."""
_HEAD: Final = b"PK\x03\x04"
_HEADER: Final = struct.Struct("<4s5H3L2H")
"""The header before a member: among others its size (the field before the last three), and the lengths of its name and
of a field after that."""
_TRAILER: Final = re.compile(rb"echelon-checkpoint (\d{20}) ([0-9a-f]{64})")
NO_HASH: Final = "0" * 64

_BEFORE_HASH: Final = b',\n "sha256": "'
_AFTER_HASH: Final = b'"\n}\n'
_HASH: Final = text_like(r"([0-9a-f]{64})?", "a hash of 64 hex digits")
_SCHEMA: Final = {
    "echelon_version": TEXT,
    "torch_version": TEXT,
    "saved_at": TIME,
    "lineage": LINEAGE,
    "mesh": {TEXT: POSITIVE},
    "parts": {TEXT: [FILE_NAME]},
    "files": {FILE_NAME: {"size": COUNT, "sha256": _HASH}},
    "parameters": [TEXT],
}


@dataclass(frozen=True)
class Origin:
    """The run that writes a checkpoint, and the time."""

    lineage: str = ""
    """The id, in hex, of the run and of those that resume it; retention does not delete checkpoints of another one."""
    saved_at: str = ""
    """The time of its last save, as in the manifest; empty before the first."""

    def after(self) -> Self:
        """Return the origin of the next checkpoint, saved now, or just after this one if the clock was set back."""
        now = time_text(datetime.now(UTC))
        if self.saved_at >= now:
            with suppress(OverflowError):  # a forged time at the end of the year 9999 has no later time
                now = max(now, self.saved_at)
                now = time_text(datetime.fromisoformat(now) + timedelta(microseconds=1))
        return replace(self, saved_at=now)

    def not_before(self, saved_at: str) -> Self:
        """Return the origin of a run that follows a checkpoint saved at this time."""
        return replace(self, saved_at=max(self.saved_at, saved_at))

    def going_on_from(self, manifest: Manifest) -> Self:
        """Return the origin of a run that resumes from a checkpoint."""
        return replace(self, lineage=manifest.lineage or self.lineage).not_before(manifest.saved_at)


NO_RUN: Final = Origin()
"""The origin of a state saved outside of a run."""


@dataclass(frozen=True)
class Manifest:
    """The contents of ``manifest.json``."""

    echelon_version: str
    torch_version: str
    saved_at: str
    """UTC, ISO 8601 with microseconds, which sorts as text; later than that of every checkpoint it follows."""
    lineage: str
    """The id of the run and of those that it resumed; empty for a state that was not saved by a run."""
    mesh: Mapping[str, int]
    """The degrees of parallelism of the run; empty for one process."""
    parts: Mapping[str, Sequence[str]]
    """For each top-level key of the state, the files with its tensors; its other values are in ``state.json``."""
    parameters: Sequence[str]
    """The names of the model's tensors."""
    files: Mapping[str, FileRecord]
    folder: str = ""
    """In a store, the folder beside the manifest that has the files; empty where they lie beside it."""
    nodes: Sequence[NodePart] = ()
    """The part of each node, if the nodes of the run shared no folder; each has only its own."""

    def to_bytes(self) -> bytes:
        """Return the text of the file; its last line is the hash of everything before it."""
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "echelon_version": self.echelon_version,
            "torch_version": self.torch_version,
            "saved_at": self.saved_at,
            "lineage": self.lineage,
            "mesh": dict(self.mesh),
            "parts": {part: list(names) for part, names in self.parts.items()},
            "files": {name: {"size": file.size, "sha256": file.sha256} for name, file in self.files.items()},
            "parameters": list(self.parameters),
            **({"folder": self.folder} if self.folder else {}),
            **({"nodes": [part.to_json() for part in self.nodes]} if self.nodes else {}),
        }
        head = json.dumps(content, indent=1).encode().removesuffix(b"\n}")
        return head + _BEFORE_HASH + hashlib.new(HASH_NAME, head).hexdigest().encode() + _AFTER_HASH


def read_manifest(folder: AnyPath, held: int | None = None) -> Manifest:
    """Return the manifest of a checkpoint, which may be `held` open; see `while_it_stays`.

    Raises:
        CheckpointError: if it is missing, damaged, or of an unknown format version.
    """
    if isinstance(folder, StorePath):
        return _read_in_store(folder)
    path = folder / MANIFEST
    try:
        if is_one_file(folder, held):
            return _read_in_file(folder, held)
        if held is None and not folder.is_dir():
            raise CheckpointError(
                f"{folder} is not a checkpoint folder{'' if folder.exists() else ': it does not exist'}; give another "
                "one."
            )
        place = path if held is None else MANIFEST
        try:
            status = os.stat(place, dir_fd=held)
        except FileNotFoundError:
            status = None
        if status is None or not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is missing; the checkpoint is incomplete; use another one.")
        if status.st_size > LARGEST_JSON:
            raise CheckpointError(f"{path} has {status.st_size} bytes, more than any manifest; use another checkpoint.")
        with open(os.open(place, os.O_RDONLY, dir_fd=held), "rb") as file:
            raw = file.read()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {explain_os_error(error)}.") from error
    return _from_bytes(raw, str(path))


def read_object(file: MappedFile | FilePiece | FetchedFile) -> dict[str, object]:
    """Return the JSON object in a file, or in a member of one file."""
    if file.size > LARGEST_JSON:
        raise CheckpointError(f"{file.path} has {file.size} bytes, more than Echelon writes; use another checkpoint.")
    try:
        content = json.loads(read_zip_member(file.content()) if isinstance(file, FilePiece) else file.content())
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(
            f"{file.path} is not JSON as Echelon writes it ({error}); use another checkpoint."
        ) from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file.path} holds a {type(content).__name__}, not an object; use another checkpoint.")
    return content


def _read_in_store(folder: StorePath) -> Manifest:
    try:
        return manifest_from((folder / MANIFEST).read_bytes(), str(folder / MANIFEST))
    except FileNotFoundError:
        found = _read_in_object(folder)
        if found is not None:
            return found
        raise CheckpointError(
            f"{folder / MANIFEST} is missing; the checkpoint is incomplete; use another one."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be read: {explain_os_error(error)}.") from error


def manifest_from(raw: bytes, place: str) -> Manifest:
    """Return the manifest in the content of a file.

    Raises:
        CheckpointError: if it is damaged, or of an unknown format version.
    """
    return _from_bytes(raw, place)


def with_folder(manifest: Manifest, folder: str) -> bytes:
    """Return the content of the manifest that makes a folder of a store a checkpoint."""
    return replace(manifest, folder=folder).to_bytes()


def is_checkpoint(path: AnyPath) -> bool:
    """Return whether there is a checkpoint folder with a manifest, or a checkpoint in one file, perhaps damaged."""
    if isinstance(path, StorePath):
        return (path / MANIFEST).is_file() or _is_object(path)
    return (path / MANIFEST).is_file() or is_checkpoint_file(path)


def is_checkpoint_file(path: Path) -> bool:
    """Return whether a file begins or ends as a checkpoint in one file does, without reading the rest."""
    if not path.is_file():  # before it is opened: a named pipe has no end
        return False
    try:
        with path.open("rb") as file:
            return _is_begun(file) or _end_of(file) is not None
    except OSError:
        return False


def _is_object(path: StorePath) -> bool:
    """Return whether an object begins or ends as a checkpoint in one file does."""
    size = path.store.size(path)
    if not size:
        return False
    head = path.store.read_range(path, 0, min(size, _HEADER.size + len(ROOT) + 1))
    return _is_begun(io.BytesIO(head)) or _end_of_object(path, size) is not None


def _end_of_object(path: StorePath, size: int) -> re.Match[bytes] | None:
    return _TRAILER.fullmatch(path.store.read_range(path, max(0, size - len(make_trailer(0))), size))


def _read_in_object(path: StorePath) -> Manifest | None:
    """Return the manifest of a checkpoint in one object; None if there is no object."""
    size = path.store.size(path)
    if size is None:
        return None
    target = link_target(path)
    if isinstance(target, StorePath):
        return _read_in_store(target)
    end = _end_of_object(path, size)
    if end is None:
        raise CheckpointError(f"{path} is not a checkpoint, or its end is missing; use another one.")
    begin = int(end[1])
    rest = path.store.read_range(path, begin, size) if 0 <= size - begin <= 2 * LARGEST_JSON else b""
    return _at_end(path, end, rest, size)


def is_torch_file(path: Path) -> bool:
    """Return whether a file is empty, or is one of ``torch.save`` by its first bytes."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(_HEADER.size + 256)
    if len(head) < _HEADER.size:
        return not head
    length = _HEADER.unpack(head[: _HEADER.size])[-2]
    return head.startswith(_HEAD) and head[_HEADER.size :][:length].endswith(b"/data.pkl")


def make_trailer(begin: int, digest: str = NO_HASH) -> bytes:
    """Return the last bytes of a checkpoint in one file, the comment of the zip file.

    Args:
        begin: the first byte of the member with the manifest.
        digest: the hash of all bytes from there to the hash itself.
    """
    return f"{FORMAT} {begin:020d} {digest}".encode()


def read_zip_member(content: bytes) -> bytes:
    """Return what follows the header of a stored member of a zip file.

    Raises:
        ValueError: if there is no header.
    """
    if len(content) < _HEADER.size:
        raise ValueError(f"a header of {len(content)} bytes")
    signature, *_, size, length, extra = _HEADER.unpack(content[: _HEADER.size])
    begin = _HEADER.size + length + extra
    if signature != _HEAD or len(content) < begin + size:
        raise ValueError(f"{size} bytes announced by a header {signature!r} of {begin}")
    return content[begin : begin + size]


def _is_begun(file: BinaryIO) -> bool:
    file.seek(0)
    head = file.read(_HEADER.size + len(ROOT) + 1)
    return head.startswith(_HEAD) and head.endswith(f"{ROOT}/".encode())


def _end_of(file: BinaryIO) -> re.Match[bytes] | None:
    size, length = file.seek(0, os.SEEK_END), len(make_trailer(0))
    file.seek(max(0, size - length))
    return _TRAILER.fullmatch(file.read(length))


def _read_in_file(path: Path, held: int | None) -> Manifest:
    """Return the manifest of a checkpoint in one file, after checking all that follows its pieces."""
    with open(os.open(path, os.O_RDONLY) if held is None else os.dup(held), "rb") as file:
        end = _end_of(file)
        if end is None:
            raise CheckpointError(
                f"{path} is damaged: its end is missing; use another checkpoint."
                if _is_begun(file)
                else f"{path} is not a checkpoint folder, nor a file that Echelon has saved; give another one."
            )
        begin, size = int(end[1]), file.seek(0, os.SEEK_END)
        is_there = 0 <= size - begin <= 2 * LARGEST_JSON
        rest = file.read(size - begin) if is_there and file.seek(begin) == begin else b""
    return _at_end(path, end, rest, size)


def _at_end(path: AnyPath, end: re.Match[bytes], rest: bytes, size: int) -> Manifest:
    """Return the manifest in the last bytes of a checkpoint in one file, after checking them."""
    begin = int(end[1])
    if not rest:
        raise CheckpointError(f"{path} is damaged: it has {size} bytes, not {begin}; use another checkpoint.")
    if hashlib.new(HASH_NAME, rest[:-64]).hexdigest().encode() != end[2]:
        raise CheckpointError(f"{path} is damaged: its end does not match its own {HASH_NAME}; use another checkpoint.")
    place = f"{MANIFEST} in {path}"
    try:
        raw = read_zip_member(rest)
    except ValueError as error:
        raise CheckpointError(f"{place} is damaged ({error}); use another checkpoint.") from None
    manifest = _from_bytes(raw, place)
    if sum(piece.size for piece in manifest.files.values()) != begin:
        raise CheckpointError(f"{place} lists pieces that do not end at byte {begin}; use another checkpoint.")
    return manifest


def _from_bytes(raw: bytes, path: str) -> Manifest:
    head, hash_ = _split_hash(raw)
    if head is None or hashlib.new(HASH_NAME, head).hexdigest() != hash_:
        raise CheckpointError(
            f"{path} is damaged: its content does not match its own {HASH_NAME}; use another checkpoint."
        )
    return _parse_manifest(parse_json(head + b"\n}", path), path)


def _split_hash(raw: bytes) -> tuple[bytes | None, str]:
    tail = len(_BEFORE_HASH) + 64 + len(_AFTER_HASH)
    head, end = raw[:-tail], raw[-tail:]
    if not (end.startswith(_BEFORE_HASH) and end.endswith(_AFTER_HASH)):
        return None, ""
    return head, end[len(_BEFORE_HASH) : -len(_AFTER_HASH)].decode("ascii", "replace")


def _parse_manifest(content: Any, path: str) -> Manifest:
    check_schema(content, {"format": FORMAT, "format_version": COUNT, "echelon_version": TEXT}, path)
    if content["format_version"] != FORMAT_VERSION:
        raise CheckpointError(
            f"The checkpoint has format version {content['format_version']!r}, but this version of Echelon reads "
            f"{FORMAT_VERSION}; read it with Echelon {format_as_line(content['echelon_version'])}, which wrote it."
        )
    folder, nodes = content.pop("folder", ""), content.pop("nodes", [])
    check_schema(
        {**content, "folder": folder or "_", "nodes": nodes}, {**_SCHEMA, "folder": FILE_NAME, "nodes": NODES}, path
    )
    for names in content["parts"].values():
        for name in names:
            if name not in content["files"]:
                raise CheckpointError(f"{path} names a file {name!r} that it does not list; use another checkpoint.")
    fields = {name: content[name] for name in _SCHEMA}
    files = {name: FileRecord(file["size"], file["sha256"]) for name, file in content["files"].items()}
    return Manifest(**{**fields, "files": files, "folder": folder, "nodes": list(map(NodePart.from_json, nodes))})


def stems_of(parts: Iterable[str]) -> dict[str, str]:
    """Return the stem of each part's file names, in characters that every file system accepts."""
    stems: dict[str, str] = {}
    known: set[str] = set()
    for part in parts:
        stem = re.sub(r"[^A-Za-z0-9_]", "_", part)[:100] or "_"
        names = (f"{stem}{number or ''}" for number in itertools.count())
        stems[part] = next(name for name in names if name.lower() not in known)
        known.add(stems[part].lower())
    return stems
