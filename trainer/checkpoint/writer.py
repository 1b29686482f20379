"""Writers: how a run's checkpoints reach the disk, in the step's way or beside it."""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from ...strategies.distributed.process_group import ProcessGroup
from ...strategies.state.lazy_tensor import Block
from .atomic_folder import point
from .coordinator import Ranks
from .pruning import remove
from .saving import Snapshot, take, write
from .saving_by_ranks import write_together

_logger = logging.getLogger("echelon")

Copies: TypeAlias = list[tuple[Tensor, Tensor]]
"""Pairs of a buffer and the tensor to copy to it."""


class Writer(Protocol):
    """What the trainer writes checkpoints with. All of it is called from one thread, in order."""

    is_copying: bool
    """Whether `wait_for_copy` may have to wait; an attribute, as it is asked at every step."""
    has_failed: bool
    """Whether `check` will raise; likewise."""

    def save(
        self,
        path: Path,
        state: Mapping[str, Any],
        *,
        mesh: Mapping[str, int] | None = None,
        still: Collection[str] = (),
    ) -> None:
        """Save `state` as it is now; the parts named `still` do not change before the caller calls `wait_for_copy`."""

    def wait_for_copy(self) -> None:
        """Wait until the parts that `save` was told to be still may change: before the optimizers step."""

    def point(self, link: Path, path: Path) -> None:
        """Make `link` stand for the checkpoint at `path`, once that is committed."""

    def remove(self, path: Path) -> None:
        """Delete a checkpoint, unless it is the newest valid one, once every save before this call is committed."""

    def raise_if_failed(self) -> None:
        """Raise the error of a write that failed; at every step boundary."""

    def close(self) -> None:
        """Wait until everything is committed, and raise the error of a write that failed."""

    def abandon(self) -> None:
        """Note that the run has failed: `close` waits some seconds more for other ranks, which may be dead."""


class SyncWriter:
    """Writes while the caller waits; with `ranks`, which all call `save`, each its part."""

    is_copying = False
    has_failed = False

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = ranks

    def save(
        self,
        path: Path,
        state: Mapping[str, Any],
        *,
        mesh: Mapping[str, int] | None = None,
        still: Collection[str] = (),
    ) -> None:
        """Write a checkpoint; it is committed on return."""
        _write(path, _take(state, mesh, self._ranks), self._ranks)

    def wait_for_copy(self) -> None:
        """Return: nothing is ever pending."""

    def point(self, link: Path, path: Path) -> None:
        """Replace `link`."""
        point(link, path)

    def remove(self, path: Path) -> None:
        """Delete a checkpoint, unless it is the newest valid one."""
        remove(path)

    def raise_if_failed(self) -> None:
        """Return: errors were raised where they happened."""

    def close(self) -> None:
        """Return: nothing is ever pending."""

    def abandon(self) -> None:
        """Return: nothing is ever pending."""


class AsyncWriter:
    """Writes in a thread; the caller waits only until the tensors are copied to buffers, which every save reuses.

    At most one write is in flight: a second `save` waits for the first. After a failed write, what was to follow it
    (links, removals) is dropped, and the error is raised by the next call of any method. With `ranks`, which all call
    `save`, each copies and writes what it owns, and all learn of an error of any.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = ranks
        self.is_copying = self.has_failed = False
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._settled = threading.Event()
        self._settled.set()
        self._lock = threading.Lock()
        self._jobs: deque[Callable[[], object]] = deque()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self,
        path: Path,
        state: Mapping[str, Any],
        *,
        mesh: Mapping[str, int] | None = None,
        still: Collection[str] = (),
    ) -> None:
        """Copy `state` and return; it is written in a thread.

        Raises:
            CheckpointError: for a value that a checkpoint cannot hold, or of an earlier write that failed.
        """
        self.close()
        snapshot = _take(state, mesh, self._ranks)
        staged = self._allocate(snapshot)
        copies = [
            (part, staged[part][key].tensor, piece.tensor)
            for part, pieces in snapshot.pieces.items()
            for key, piece in pieces.items()
        ]
        later = [(buffer, tensor) for part, buffer, tensor in copies if part in still]
        copy_all([(buffer, tensor) for part, buffer, tensor in copies if part not in still])
        self._settled.clear()
        self.is_copying = True
        self._submit(functools.partial(self._write, Path(path), replace(snapshot, pieces=staged), later, _now(later)))

    def wait_for_copy(self) -> None:
        """Wait until the parts that `save` was told to be still are copied."""
        self._settled.wait()
        self.is_copying = False

    def point(self, link: Path, path: Path) -> None:
        """Make `link` stand for the checkpoint at `path`, once that is committed."""
        self._submit(functools.partial(point, link, path))

    def remove(self, path: Path) -> None:
        """Delete a checkpoint, unless it is the newest valid one, once every save before this call is committed."""
        self._submit(functools.partial(remove, path))

    def raise_if_failed(self) -> None:
        """Raise the error of a write that failed."""
        with self._lock:
            self._raise()

    def close(self) -> None:
        """Wait until everything is committed; raise the error of a write that failed. More can be saved afterwards."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()
        self.raise_if_failed()

    def abandon(self) -> None:
        """Note that the run has failed: `close` waits some seconds more for other ranks, which may be dead."""
        if self._ranks is not None:
            self._ranks.end()

    def _allocate(self, snapshot: Snapshot) -> dict[str, dict[str, Block]]:
        previous, self._buffers = self._buffers, {}
        staged: dict[str, dict[str, Block]] = {}
        for part, pieces in snapshot.pieces.items():
            staged[part] = {}
            for key, piece in pieces.items():
                tensor = piece.tensor
                buffer = previous.pop((part, key), None)
                if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._buffers[part, key] = buffer
                staged[part][key] = Block(buffer, piece.offsets)
        return staged

    def _write(self, path: Path, snapshot: Snapshot, later: Copies, ready: torch.cuda.Event | None) -> None:
        try:
            copy_all(later, ready)
            later.clear()
        finally:
            self._settled.set()
        _write(path, snapshot, self._ranks)

    def _submit(self, job: Callable[[], object]) -> None:
        with self._lock:
            self._raise()
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="echelon-checkpoint")
                self._thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._thread = None
                    return
                job = self._jobs.popleft()
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - whatever it is, the caller's thread raises it
                # said here too, since a program that is ending calls nothing more
                _logger.error("%s", error)
                with self._lock:
                    self._error, self.has_failed = error, True
                    self._jobs.clear()

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error, self.has_failed = self._error, None, False
            raise error


def make_writer(group: ProcessGroup | None, *, is_async: bool) -> Writer:
    """Return the writer of a run: in a thread or not, of one process or of all in a group. Collective."""
    ranks = None if group is None else Ranks(group.store, group.rank, group.world_size)
    return AsyncWriter(ranks) if is_async else SyncWriter(ranks)


def _take(state: Mapping[str, Any], mesh: Mapping[str, int] | None, ranks: Ranks | None) -> Snapshot:
    """Take what this rank has to write; a rank that cannot tells the others, which would wait for it."""
    if ranks is None:
        return take(state, mesh)
    ranks.begin()
    try:
        return take(state, mesh, rank=ranks.rank, world_size=ranks.world_size)
    except BaseException as error:
        ranks.fail(error)
        ranks.leave()
        raise


def _write(path: Path, snapshot: Snapshot, ranks: Ranks | None) -> None:
    if ranks is None:
        write(path, snapshot)
    else:
        write_together(path, snapshot, ranks)


def _now(copies: Copies) -> torch.cuda.Event | None:
    """Mark the present end of the device's work, which a copy in another thread has to wait for."""
    if not any(tensor.is_cuda for _, tensor in copies):
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def copy_all(copies: Copies, ready: torch.cuda.Event | None = None) -> None:
    """Copy tensors to their buffers, if need be once the device has come to `ready`; return when it is done."""
    if not any(tensor.is_cuda for _, tensor in copies):
        for buffer, tensor in copies:
            buffer.copy_(tensor)
        return
    stream = torch.cuda.current_stream() if ready is None else torch.cuda.Stream()
    with torch.cuda.stream(stream):
        if ready is not None:
            stream.wait_event(ready)
        for buffer, tensor in copies:
            buffer.copy_(tensor, non_blocking=True)
    stream.synchronize()
