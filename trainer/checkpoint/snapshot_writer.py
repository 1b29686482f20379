"""MemoryWriter: the state of a run into shared memory, in little of its time."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ...strategies.errors import EchelonError
from ...strategies.snapshots.index import FileEntry
from ...strategies.snapshots.shared_file import MemoryFile, checksum
from ...strategies.snapshots.snapshots import Draft, MemorySnapshots, Share, SnapshotCost
from ...strategies.state.lazy_tensor import Block
from .files import FileRecord
from .manifest import MANIFEST
from .safetensors_file import lay_out
from .saving import STATE, Snapshot, file_name, manifest_of, stems_of, take, to_json
from .saving_by_ranks import add_entries
from .writer import Copies, copy_all

_PATIENCE: Final = 0.5
"""Seconds that a failed run waits for a snapshot under way: the one before it will do."""
_HAS_OUTLINE: Final = ("model", "optimizers")
"""The parts of which each rank reads what it uses, see `restoring`; the others are read as a whole."""

_log = logging.getLogger("echelon")


@dataclass(frozen=True)
class _Filled:
    """A file of a snapshot with its tensors in it."""

    name: str
    part: str
    file: MemoryFile
    writer: int | None
    outline: int


@dataclass(frozen=True)
class _Room:
    """A file that has its header, for tensors of certain shapes: what stays from snapshot to snapshot."""

    signature: Sequence[object]
    file: MemoryFile
    outline: int
    places: Mapping[str, Tensor]
    """Where each tensor goes; who writes to one writes to the file."""


class MemoryWriter:
    """Takes snapshots into the memory of the nodes; the caller waits only while tensors are copied there.

    They are checked, described and sent to another node in a thread. What goes wrong is logged, and never ends a run:
    it goes on with the snapshot before, and its checkpoints. Collective: all ranks call everything but `close`, in the
    same order.
    """

    def __init__(self, snapshots: MemorySnapshots) -> None:
        self._snapshots = snapshots
        self._thread: threading.Thread | None = None
        self._rooms: dict[Path, _Room] = {}
        self._is_over = False
        self._is_failing = False  # what goes wrong again and again is logged once

    def save(self, state: Mapping[str, Any], step: int, *, gathering: float = 0.0) -> None:
        """Copy `state`, wait for the snapshot before that if it is not complete, and return.

        Args:
            state: as `checkpoint.save` takes it.
            step: of which it is.
            gathering: the seconds that it has taken to get the state, for `MemorySnapshots.cost`.
        """
        self.close()
        if self._snapshots.is_broken:
            return
        began = time.perf_counter()
        draft = self._snapshots.begin(step)
        snapshot: Snapshot | None = None
        filled: list[_Filled] = []
        fault = ""
        try:
            snapshot, filled = self._copy(draft, state)
        except (EchelonError, OSError) as error:
            fault = str(error)  # told in the thread, since others wait for this rank
        cost = SnapshotCost(gathering, time.perf_counter() - began)
        work = functools.partial(self._finish, draft, snapshot, filled, fault, cost)
        # a daemon: a process whose run has failed does not wait for ranks that may be dead
        self._thread = threading.Thread(target=work, name="echelon-snapshot", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait until the snapshot under way is complete, or has failed."""
        if self._thread is not None:
            self._thread.join(_PATIENCE if self._is_over else None)

    def abandon(self) -> None:
        """Note that the run has failed: `close` waits for half a second only."""
        self._is_over = True

    def _copy(self, draft: Draft, state: Mapping[str, Any]) -> tuple[Snapshot, list[_Filled]]:
        """Copy this rank's tensors into files."""
        snapshots = self._snapshots
        snapshot = take(state, rank=snapshots.rank, world_size=snapshots.world_size, writes_common=snapshots.is_first)
        stems = stems_of(snapshot.pieces)
        filled: list[_Filled] = []
        copies: Copies = []
        for part, is_own, pieces in _groups(snapshot):
            writer = snapshots.rank if is_own else None
            name = file_name(stems[part], writer, snapshots.world_size)
            room = self._room(draft, name, pieces)
            copies += [(place, pieces[key].tensor) for key, place in room.places.items()]
            outline = room.outline if is_own and part in _HAS_OUTLINE else 0
            filled.append(_Filled(name, part, room.file, writer, outline))
        copy_all(copies)
        names = {one.name for one in filled}
        self._rooms = {
            path: room for path, room in self._rooms.items() if path.parent != draft.path or path.name in names
        }
        # the thread needs the values only; it must not keep tensors alive
        return replace(snapshot, pieces={part: {} for part in snapshot.pieces}), filled

    def _room(self, draft: Draft, name: str, pieces: Mapping[str, Block]) -> _Room:
        """Return the file for some tensors: that of two snapshots ago, if they were the same."""
        signature = [(key, piece.tensor.shape, piece.tensor.dtype, piece.offsets) for key, piece in pieces.items()]
        known = self._rooms.get(draft.path / name)
        is_alike = known is not None and known.signature == signature
        if known is not None and is_alike and self._snapshots.file(draft, name, known.file.size) is known.file:
            return known
        layout = lay_out(pieces)
        file = self._snapshots.file(draft, name, layout.size)
        file.bytes[: len(layout.header)].copy_(torch.frombuffer(bytearray(layout.header), dtype=torch.uint8))
        places = {key: _place(file, start, pieces[key].tensor) for key, start in layout.places.items()}
        room = self._rooms[draft.path / name] = _Room(signature, file, len(layout.header), places)
        return room

    def _finish(
        self, draft: Draft, snapshot: Snapshot | None, filled: Sequence[_Filled], fault: str, cost: SnapshotCost
    ) -> None:
        try:
            files = {
                one.name: FileEntry(one.file.size, checksum(one.file.bytes), one.writer, one.outline) for one in filled
            }
            content = None
            if snapshot is not None:
                told = [one for one in filled if self._snapshots.rank == 0 or one.writer is not None]
                content = {
                    "files": {one.name: one.file.size for one in told},
                    "parts": [(one.part, one.name) for one in told],
                    "entries": snapshot.entries if self._snapshots.rank else {},
                }
            share = Share(files, sorted(snapshot.replicas) if snapshot is not None else [], content, fault)
            self._snapshots.commit(draft, share, functools.partial(_describe, draft.path, snapshot))
        except Exception as error:  # noqa: BLE001 - a thread has nobody to tell
            self._snapshots.is_broken |= not isinstance(error, EchelonError)  # the others are where we are not
            # a rank that has died is the news, of which others tell
            is_known = self._is_failing or self._snapshots.is_broken
            if self._snapshots.rank == 0:
                _log.log(logging.INFO if is_known else logging.WARNING, "%s", error)
            self._is_failing = True
        else:
            self._is_failing = False
        finally:
            cost = replace(cost, writing=cost.writing + time.thread_time())
            self._snapshots.cost = None if self._snapshots.is_broken else cost


def _groups(snapshot: Snapshot) -> Iterator[tuple[str, bool, dict[str, Block]]]:
    """Give for each part its tensors that are equal on all ranks, and then those of this rank."""
    for part, pieces in snapshot.pieces.items():
        for is_own in (False, True):
            found = {key: piece for key, piece in pieces.items() if (key in snapshot.own[part]) is is_own}
            if found:
                yield part, is_own, found


def _describe(folder: Path, snapshot: Snapshot | None, contents: Sequence[Any]) -> dict[str, FileEntry]:
    """Write, on rank 0, ``state.json`` and the manifest, whose hashes are empty: the index has better ones."""
    assert snapshot is not None
    parts: dict[str, list[str]] = {part: [] for part in snapshot.values}
    for rank, content in enumerate(contents):
        add_entries(snapshot, rank, content["entries"])
        for part, name in content["parts"]:
            parts[part].append(name)
    files = {name: FileRecord(size, "") for content in contents for name, size in content["files"].items()}
    text = to_json(snapshot.values)
    files[STATE] = FileRecord(len(text), "")
    texts = {STATE: text, MANIFEST: manifest_of(snapshot, parts, files).to_bytes()}
    for name, content in texts.items():
        (folder / name).unlink(missing_ok=True)  # someone may still read the old one
        (folder / name).write_bytes(content)
    return {name: FileEntry(len(content), checksum(content)) for name, content in texts.items()}


def _place(file: MemoryFile, start: int, like: Tensor) -> Tensor:
    """Return the place of a tensor in a file."""
    size = like.numel() * like.element_size()
    return file.bytes[start : start + size].view(like.dtype).view(like.shape)
