"""SnapshotIndex: the files of a snapshot, the nodes on which it was taken, and which files a rank needs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

INDEX: Final = "index.json"

Returns: TypeAlias = Sequence[tuple[int, int]]
"""Rounds, each with the step from which it resumed."""


@dataclass(frozen=True)
class FileEntry:
    """Size and checksum of one file of a snapshot."""

    size: int
    checksum: str
    writer: int | None = None
    """The rank that wrote it; another node has a copy. None if each node wrote its own."""
    outline: int = 0
    """Size of its header, which lists its tensors, for ranks that do not read them; 0 if every rank reads them."""


@dataclass(frozen=True)
class SnapshotIndex:
    """The files of one snapshot, from all ranks; it is identical on every node."""

    round: int
    number: int
    """Counts the snapshots of its round, from 1."""
    slot: str
    """The folder that holds it; each round has two, used in turn."""
    step: int
    nodes: Sequence[int]
    """The node of each rank."""
    sources: Sequence[Sequence[int]]
    """For each rank, the ranks that wrote what it holds: itself and its replicas."""
    files: Mapping[str, FileEntry]

    @property
    def age(self) -> tuple[int, int]:
        """Sort key: newer snapshots are greater. Not the step, which a run that rolls back reaches twice."""
        return self.round, self.number

    def is_left_behind(self, returns: Returns) -> bool:
        """Return whether a later round resumed from an earlier step, so that the steps after it were done again."""
        return any(number > self.round and step < self.step for number, step in returns)

    def needed_by(self, node: int, nodes: Sequence[int]) -> set[str]:
        """Return the files that a node needs whole if the ranks are now on `nodes`; of others it needs the outlines."""
        if not _are_alike(self.nodes, nodes):
            return set(self.files)  # shards change, so each rank may read any file
        writers = {source for rank, at in enumerate(nodes) if at == node for source in self.sources[rank]}
        return {name for name, file in self.files.items() if not file.outline or file.writer in writers}

    def to_bytes(self) -> bytes:
        """Return the content of the index file; its first line is a hash of the rest."""
        text = json.dumps(asdict(self), separators=(",", ":")).encode()
        return hashlib.sha256(text).hexdigest().encode() + b"\n" + text


def read_index(slot: Path) -> SnapshotIndex | None:
    """Return the index of a snapshot; None if it is missing or damaged."""
    try:
        hash_, _, text = (slot / INDEX).read_bytes().partition(b"\n")
        if hashlib.sha256(text).hexdigest().encode() != hash_:
            return None
        content: dict[str, Any] = json.loads(text)
        files = {name: FileEntry(**file) for name, file in content.pop("files").items()}
        return SnapshotIndex(**content, files=files)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_index(slot: Path, index: SnapshotIndex) -> None:
    """Write the index of a snapshot, atomically."""
    temporary = slot / f".{INDEX}"
    temporary.write_bytes(index.to_bytes())
    temporary.replace(slot / INDEX)


def _are_alike(before: Sequence[int], now: Sequence[int]) -> bool:
    """Return whether the same ranks share a node, whichever node that is."""
    return [before.index(node) for node in before] == [now.index(node) for node in now]
