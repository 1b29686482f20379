"""MemoryWriter: copies the state of a run into shared memory, with little waiting for training."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ...common.errors import EchelonError
from ...strategies.devices.streams import has_streams
from ...strategies.snapshots.index import FileEntry
from ...strategies.snapshots.shared_file import MemoryFile, compute_checksum
from ...strategies.snapshots.snapshots import Contribution, Draft, MemorySnapshots, SnapshotCost
from ...strategies.state.lazy_tensor import Block
from .files import FileRecord
from .manifest import MANIFEST, NO_RUN, STATE, Origin, stems_of
from .on_nodes.parts import READ_IN_PART
from .safetensors_file import lay_out
from .saving import EncodedState, encode_state, file_name, manifest_of, to_json
from .staging import Copies, Marks, copy_all, record_events

_PATIENCE: Final = 0.5
"""Seconds that a failed run waits for a snapshot in progress, since the previous one can be used instead."""

_log = logging.getLogger("echelon")


@dataclass(frozen=True)
class _SnapshotFile:
    """A file in memory with its header; the next but one snapshot reuses it for tensors of the same shapes."""

    name: str
    part: str
    writer: int | None
    shapes: Sequence[object]
    memory: MemoryFile
    outline: int
    places: Mapping[str, Tensor]
    """The place of each tensor; writing to it writes to the file."""


@dataclass
class _Taken:
    """The part of a state that a rank has copied, and what is left to copy."""

    encoded: EncodedState | None = None
    files: Sequence[_SnapshotFile] = ()
    later: Copies = field(default_factory=list)
    """Copies to make from a GPU, once it has reached the `marks`."""
    marks: Marks = field(default_factory=dict)
    fault: str = ""


class MemoryWriter:
    """Takes snapshots into the memory of the nodes; the caller waits only while tensors are copied there.

    Tensors on a GPU that do not change until the optimizers step are copied in a thread, on a separate stream. The
    thread also checks and describes snapshots and sends them to another node. Errors are logged and never end a run: it
    continues with the previous snapshot and its checkpoints. Collective: all ranks call `save`, in the same order.
    """

    def __init__(self, snapshots: MemorySnapshots) -> None:
        self._snapshots = snapshots
        self._thread: threading.Thread | None = None
        self._files: dict[Path, _SnapshotFile] = {}
        self._is_over = False
        self._is_failing = False  # a repeated error is logged once
        self._copied = threading.Event()
        self._copied.set()
        self._waits_since: float | None = None

    @property
    def is_copying(self) -> bool:
        """Whether `wait_for_copy` may have to wait."""
        return not self._copied.is_set()

    def save(
        self,
        state: Mapping[str, object],
        step: int,
        *,
        still: Collection[str] = (),
        gathering: float = 0.0,
        origin: Origin = NO_RUN,
    ) -> None:
        """Wait until the previous snapshot is complete, copy `state`, and return.

        Args:
            state: The state, as for `checkpoint.save`.
            step: The step after which it was taken.
            still: The parts that do not change before the caller calls `wait_for_copy`.
            gathering: The seconds that collecting the state took, for `MemorySnapshots.cost`.
            origin: The run, for the manifest.
        """
        self.close()
        if self._snapshots.is_broken:
            return
        began = time.perf_counter()
        draft = self._snapshots.begin(step)
        taken = _Taken()
        try:
            taken = self._copy(draft, state, still, origin)
        except (EchelonError, OSError) as error:
            taken.fault = str(error)  # reported in the thread, since others wait for this rank
        self._waits_since = None
        if taken.later:
            self._copied.clear()
        cost = SnapshotCost(gathering, time.perf_counter() - began)
        work = functools.partial(self._finish, draft, taken, cost)
        # a daemon, so that a process whose run has failed does not wait for ranks that may be dead
        thread = threading.Thread(target=work, name="echelon-snapshot", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the limit on processes and threads
            self._thread = None
            work()
        else:
            self._thread = thread

    def wait_for_copy(self) -> None:
        """Wait until the `still` parts of the last `save` may change; call it before the optimizers step."""
        self._waits_since = time.perf_counter()
        self._copied.wait()

    def close(self) -> None:
        """Wait until the snapshot in progress is complete or has failed."""
        if self._thread is not None:
            self._thread.join(_PATIENCE if self._is_over else None)

    def abandon(self) -> None:
        """Note that the run has failed: `close` waits for at most half a second."""
        self._is_over = True

    def _copy(self, draft: Draft, state: Mapping[str, object], still: Collection[str], origin: Origin) -> _Taken:
        """Copy this rank's tensors into files, except `still` ones on a GPU."""
        rank, world_size = self._snapshots.rank, self._snapshots.world_size
        encoded = encode_state(state, rank=rank, world_size=world_size, writes_common=self._snapshots.is_first)
        files: list[_SnapshotFile] = []
        copies: Copies = []
        later: Copies = []
        for part, writer, number, blocks in _group_by_file(encoded, rank):
            name = file_name(stems_of(encoded.blocks)[part], writer, world_size, number)
            file = self._file(draft, name, part, writer, blocks)
            for key, place in file.places.items():
                tensor = blocks[key].tensor
                (later if part in still and has_streams(tensor.device) else copies).append((place, tensor))
            files.append(file)
        copy_all(copies)
        others = {path: file for path, file in self._files.items() if path.parent != draft.path}
        self._files = others | {draft.path / file.name: file for file in files}
        # the thread needs only the values, and must not keep tensors alive
        encoded = replace(encoded, blocks={part: {} for part in encoded.blocks}, origin=origin)
        return _Taken(encoded, files, later, record_events(later))

    def _file(
        self, draft: Draft, name: str, part: str, writer: int | None, blocks: Mapping[str, Block]
    ) -> _SnapshotFile:
        """Return the file for these tensors: the one of two snapshots ago, if it has the same shapes."""
        shapes = [(key, block.tensor.shape, block.tensor.dtype, block.offsets) for key, block in blocks.items()]
        known = self._files.get(draft.path / name)
        is_alike = known is not None and known.shapes == shapes
        if known is not None and is_alike and self._snapshots.file(draft, name, known.memory.size) is known.memory:
            return known
        layout = lay_out(blocks)
        memory, header = self._snapshots.file(draft, name, layout.size), layout.header
        memory.bytes[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        places = {key: _tensor_in_file(memory, start, blocks[key].tensor) for key, start in layout.places.items()}
        outline = len(header) if writer is not None and part in READ_IN_PART else 0
        return _SnapshotFile(name, part, writer, shapes, memory, outline, places)

    def _finish(self, draft: Draft, taken: _Taken, cost: SnapshotCost) -> None:
        """Make the remaining copies, and tell the other ranks."""
        try:
            cost = self._copy_later(taken, cost)
            self._snapshots.commit(
                draft, self._share(taken), functools.partial(_write_description, draft.path, taken.encoded)
            )
        except Exception as error:  # noqa: BLE001 - no caller of a thread hears of it
            self._snapshots.is_broken |= not isinstance(error, EchelonError)  # the ranks are out of step
            # a dead rank is reported elsewhere
            is_known = self._is_failing or self._snapshots.is_broken
            if self._snapshots.rank == 0:
                _log.log(logging.INFO if is_known else logging.WARNING, "%s", error)
            self._is_failing = True
        else:
            self._is_failing = False
        finally:
            cost = replace(cost, writing=cost.writing + time.thread_time())
            self._snapshots.cost = None if self._snapshots.is_broken else cost

    def _copy_later(self, taken: _Taken, cost: SnapshotCost) -> SnapshotCost:
        """Make the remaining copies; return the cost including the time that the caller has waited for them."""
        try:
            copy_all(taken.later, taken.marks)
        except RuntimeError as error:  # from the device
            taken.encoded, taken.files, taken.fault = None, (), str(error)
        finally:
            taken.later.clear()
            since, now = self._waits_since, time.perf_counter()
            self._copied.set()
        return cost if since is None else replace(cost, writing=cost.writing + now - since)

    def _share(self, taken: _Taken) -> Contribution:
        """Return what this rank tells the others about its files."""
        encoded, files = taken.encoded, taken.files
        entries = {
            file.name: FileEntry(file.memory.size, compute_checksum(file.memory.bytes), file.writer, file.outline)
            for file in files
        }
        if encoded is None:
            return Contribution(entries, [], None, taken.fault)
        told = [file for file in files if self._snapshots.rank == 0 or file.writer is not None]
        content = {
            "files": {file.name: file.memory.size for file in told},
            "parts": [(file.part, file.name) for file in told],
            "entries": encoded.entries if self._snapshots.rank else {},
        }
        return Contribution(entries, sorted(encoded.sources), content)


def _group_by_file(encoded: EncodedState, rank: int) -> Iterator[tuple[str, int | None, int, dict[str, Block]]]:
    """Yield, for each part, the tensors that are equal on all ranks and then this rank's own, file by file."""
    for part, blocks in encoded.blocks.items():
        for is_own in (False, True):
            group = {key: block for key, block in blocks.items() if (key in encoded.own[part]) is is_own}
            for number, content in enumerate(encoded.files(part, group)):
                yield part, rank if is_own else None, number, content


def _write_description(folder: Path, encoded: EncodedState | None, contents: Sequence[Any]) -> dict[str, FileEntry]:
    """Write, on rank 0, ``state.json`` and the manifest; its hashes are empty, since the index has checksums."""
    assert encoded is not None
    parts: dict[str, list[str]] = {part: [] for part in encoded.values}
    for rank, content in enumerate(contents):
        encoded.add_entries(rank, content["entries"])
        for part, name in content["parts"]:
            parts[part].append(name)
    files = {name: FileRecord(size, "") for content in contents for name, size in content["files"].items()}
    text = to_json(encoded.values)
    files[STATE] = FileRecord(len(text), "")
    texts = {STATE: text, MANIFEST: manifest_of(encoded, parts, files).to_bytes()}
    for name, content in texts.items():
        (folder / name).unlink(missing_ok=True)  # another process may still read the old one
        (folder / name).write_bytes(content)
    return {name: FileEntry(len(content), compute_checksum(content)) for name, content in texts.items()}


def _tensor_in_file(file: MemoryFile, start: int, like: Tensor) -> Tensor:
    """Return the place of a tensor in a file, as a tensor."""
    size = like.numel() * like.element_size()
    return file.bytes[start : start + size].view(like.dtype).view(like.shape)
