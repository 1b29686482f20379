"""Writers of a run's checkpoints, in the calling thread or in a separate one."""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ...common.errors import CheckpointError
from ...common.storage import AnyPath, Pending, StorePath, as_path
from ...strategies.distributed.process_group import ProcessGroup
from ...strategies.state.lazy_tensor import Block
from .atomic_folder import point_link
from .files import FileRecord, write_bytes
from .finding import remove_checkpoint
from .manifest import MANIFEST, NO_RUN, STATE, Origin
from .safetensors_file import lay_out
from .saving import EncodedState, encode_state, manifest_of, own_files, to_json, write_checkpoint
from .saving_by_ranks import SavingGroup
from .single_file import SingleFile
from .staging import Copies, Marks, copy_all, record_events

_logger = logging.getLogger("echelon")


class Writer:
    """Writes checkpoints while the caller waits; with a `group`, all ranks call `save`, and each writes its tensors.

    All methods are called from one thread, in order.
    """

    is_copying = False
    """Whether `wait_for_copy` may have to wait; an attribute, since it is read at every step."""
    has_failed = False
    """Whether `raise_if_failed` will raise; an attribute for the same reason."""
    upload: Pending | None = None
    """The newest upload of this process to a store, which may be over; None if the newest save is on a disk."""

    def __init__(self, group: SavingGroup | None = None) -> None:
        self._group = group
        self._waits: list[Callable[[], object]] = []

    def save(
        self,
        path: AnyPath,
        state: Mapping[str, object],
        *,
        mesh: Mapping[str, int] | None = None,
        still: Collection[str] = (),
        origin: Origin = NO_RUN,
        single_file: SingleFile | None = None,
    ) -> None:
        """Save `state` as it is now; the `still` parts do not change before the caller calls `wait_for_copy`.

        With `single_file` the checkpoint is one file instead of a folder; see `SingleFile`.

        Raises:
            CheckpointError: for a value that a checkpoint cannot hold, or if a write failed.
        """
        self._write(path, replace(self._encode(state, mesh), origin=origin, single_file=single_file))

    def wait_for_copy(self) -> None:
        """Wait until the `still` parts of the last `save` may change; call it before the optimizers step."""
        waits, self._waits, self.is_copying = self._waits, [], False
        for wait in waits:
            wait()

    def also_wait(self, wait: Callable[[], object]) -> None:
        """Make the next `wait_for_copy` also call `wait`, because something else is copying the state."""
        self._waits.append(wait)
        self.is_copying = True

    def point(self, link: AnyPath, path: AnyPath) -> None:
        """Make `link` point to the checkpoint at `path` once that is committed."""
        point_link(link, path)

    def remove(self, path: AnyPath, lineage: str | None = None) -> None:
        """Delete a checkpoint, as `finding.remove_checkpoint` does, once every save before this call is committed."""
        remove_checkpoint(path, lineage)

    def raise_if_failed(self) -> None:
        """Raise the error of a failed write; called at every step boundary."""

    def close(self) -> None:
        """Wait until everything is committed; raise the error of a failed write. Saving may continue afterwards."""

    def is_done_within(self, seconds: float) -> bool:
        """Wait until everything is committed or has failed, at most for a time; return whether it is."""
        return True

    def abandon(self) -> None:
        """Note that the run has failed: `close` waits only a few more seconds for other ranks, which may be dead."""

    def _encode(self, state: Mapping[str, object], mesh: Mapping[str, int] | None) -> EncodedState:
        return encode_state(state, mesh) if self._group is None else self._group.encode(state, mesh)

    def _write(self, path: AnyPath, encoded: EncodedState) -> None:
        if self._group is None:
            write_checkpoint(path, encoded)
        else:
            self._group.write(path, encoded)


class AsyncWriter(Writer):
    """Writes in a thread; the caller waits only until the tensors are copied to buffers, which every save reuses.

    At most one write is in flight: a second `save` waits for the first. After a failed write, the actions that were to
    follow it (links, removals) are dropped, and the error is raised by the next call of `save`, `raise_if_failed` or
    `close`. A link or a removal that is not possible is logged. With a `group`, each rank copies and writes what it
    owns, and all ranks learn of any rank's error.
    """

    def __init__(self, group: SavingGroup | None = None) -> None:
        super().__init__(group)
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._copied = threading.Event()
        self._copied.set()
        self._lock = threading.Lock()
        self._tasks: deque[Callable[[], object]] = deque()
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._error: BaseException | None = None

    def save(
        self,
        path: AnyPath,
        state: Mapping[str, object],
        *,
        mesh: Mapping[str, int] | None = None,
        still: Collection[str] = (),
        origin: Origin = NO_RUN,
        single_file: SingleFile | None = None,
    ) -> None:
        self.close()
        path = as_path(path)
        encoded = replace(self._encode(state, mesh), origin=origin, single_file=single_file)
        staged = self._allocate(encoded)
        copies = [
            (part, staged[part][key].tensor, block.tensor)
            for part, blocks in encoded.blocks.items()
            for key, block in blocks.items()
        ]
        later = [(buffer, tensor) for part, buffer, tensor in copies if part in still]
        copy_all([(buffer, tensor) for part, buffer, tensor in copies if part not in still])
        self._copied.clear()
        self.also_wait(self._copied.wait)
        staged_state = replace(encoded, blocks=staged)
        self.upload = None
        if isinstance(path, StorePath):
            size = sum(block.tensor.nbytes for blocks in staged.values() for block in blocks.values())
            staged_state = replace(staged_state, pending=Pending(str(path), size))
            self.upload = staged_state.pending
        self._submit(functools.partial(self._copy_and_write, path, staged_state, later, record_events(later)))

    def point(self, link: AnyPath, path: AnyPath) -> None:
        self._submit(functools.partial(_log_if_failed, point_link, link, path))

    def remove(self, path: AnyPath, lineage: str | None = None) -> None:
        self._submit(functools.partial(_log_if_failed, remove_checkpoint, path, lineage))

    def raise_if_failed(self) -> None:
        with self._lock:
            self._raise()

    def close(self) -> None:
        # not Thread.join(): if a signal handler raises in it, CPython 3.11 believes that the thread has ended
        self._is_idle.wait()
        self.raise_if_failed()

    def is_done_within(self, seconds: float) -> bool:
        return self._is_idle.wait(seconds)

    def abandon(self) -> None:
        if self._group is not None:
            self._group.abandon()

    def _allocate(self, encoded: EncodedState) -> dict[str, dict[str, Block]]:
        previous, self._buffers = self._buffers, {}
        staged: dict[str, dict[str, Block]] = {}
        for part, blocks in encoded.blocks.items():
            staged[part] = {}
            for key, block in blocks.items():
                tensor = block.tensor
                buffer = previous.pop((part, key), None)
                if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                    buffer = torch.empty(tensor.shape, dtype=tensor.dtype)
                self._buffers[part, key] = buffer
                staged[part][key] = Block(buffer, block.offsets)
        return staged

    def _copy_and_write(self, path: AnyPath, encoded: EncodedState, later: Copies, after: Marks) -> None:
        try:
            try:
                copy_all(later, after)
                later.clear()
            finally:
                self._copied.set()
            self._write(path, encoded)
        finally:
            if encoded.pending is not None:
                encoded.pending.is_over = True

    def _submit(self, task: Callable[[], object]) -> None:
        with self._lock:
            if self.has_failed:  # only rank 0 requests links and removals: it raises where all ranks do
                return
            self._tasks.append(task)
            if not self._is_idle.is_set():
                return
            self._is_idle.clear()
        try:
            threading.Thread(target=self._work, name="echelon-checkpoint").start()
        except RuntimeError as error:  # the limit on processes and threads, or at the interpreter's exit
            _logger.info("A checkpoint is written before training continues, since there is no thread (%s).", error)
            self._work()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._tasks:
                    self._is_idle.set()
                    return
                task = self._tasks.popleft()
            try:
                task()
            except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
                # also logged here, since a program that is ending calls no other method
                _logger.error("%s", error)
                with self._lock:
                    self._error, self.has_failed = error, True
                    self._tasks.clear()

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error, self.has_failed = self._error, None, False
            raise error


class ManifestWriter(Writer):
    """Encodes a state as usual, but writes only a manifest with the names and sizes of this rank's files.

    Rank 0's also has ``state.json``, without what other ranks would add to it. Hashes are empty.

    Args:
        rank: the rank of this process.
        world_size: the number of processes that the run would have.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self._rank, self._world_size = rank, world_size

    def save(
        self,
        path: AnyPath,
        state: Mapping[str, object],
        *,
        mesh: Mapping[str, int] | None = None,
        still: Collection[str] = (),
        origin: Origin = NO_RUN,
        single_file: SingleFile | None = None,
    ) -> None:
        encoded = replace(encode_state(state, mesh, rank=self._rank, world_size=self._world_size), origin=origin)
        files: dict[str, FileRecord] = {}
        parts: dict[str, list[str]] = {part: [] for part in encoded.blocks}
        for part, name, content in own_files(encoded, self._rank, self._world_size):
            parts[part].append(name)
            files[name] = FileRecord(lay_out(content).size, "")
        if self._rank == 0:
            files[STATE] = FileRecord(len(to_json(encoded.values)), "")
        path.mkdir(parents=True)
        write_bytes(path / MANIFEST, manifest_of(encoded, parts, files).to_bytes())


def _log_if_failed(work: Callable[..., object], *arguments: object) -> None:
    """Move a link or delete a checkpoint; if that fails, log the reason, since no state is lost.

    An error here would end only rank 0, and at the end of a run after the other ranks have ended successfully.
    """
    try:
        work(*arguments)
    except CheckpointError as error:
        _logger.error("%s Training continues.", error)


def make_writer(group: ProcessGroup | None, *, is_async: bool) -> Writer:
    """Return the writer of a run: in a thread or not, for one process or all of a group. Collective."""
    if group is not None and group.is_fake:
        return ManifestWriter(group.rank, group.world_size)
    saving_group = None
    if group is not None:
        saving_group = SavingGroup(group.store, group.rank, group.world_size, nodes=group.nodes)
    return AsyncWriter(saving_group) if is_async else Writer(saving_group)
