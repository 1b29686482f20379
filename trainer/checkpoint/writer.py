"""Writers of a run's checkpoints, while the step waits or in a thread beside it."""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...strategies.distributed.process_group import ProcessGroup
from ...strategies.state.lazy_tensor import Block
from .atomic_folder import point
from .finding import remove
from .saving import EncodedState, encode_state, write
from .saving_by_ranks import SavingGroup

_logger = logging.getLogger("echelon")

Copies: TypeAlias = list[tuple[Tensor, Tensor]]
"""Pairs of a buffer and the tensor to be copied into it."""


class Writer:
    """Writes checkpoints while the caller waits; with a `group`, whose ranks all call `save`, each its tensors.

    All of it is called from one thread, in order.
    """

    is_copying = False
    """Whether `wait_for_copy` may have to wait; an attribute, as it is asked at every step."""
    has_failed = False
    """Whether `raise_if_failed` will raise; likewise."""

    def __init__(self, group: SavingGroup | None = None) -> None:
        self._group = group

    def save(
        self,
        path: Path,
        state: Mapping[str, Any],
        *,
        mesh: Mapping[str, int] | None = None,
        still: Collection[str] = (),
    ) -> None:
        """Save `state` as it is now; the parts named `still` do not change before the caller calls `wait_for_copy`.

        Raises:
            CheckpointError: for a value that a checkpoint cannot hold, or of a write that failed.
        """
        self._write(path, self._encode(state, mesh))

    def wait_for_copy(self) -> None:
        """Wait until the parts that `save` was told to be still may change: before the optimizers step."""

    def point(self, link: Path, path: Path) -> None:
        """Make `link` stand for the checkpoint at `path`, once that is committed."""
        point(link, path)

    def remove(self, path: Path) -> None:
        """Delete a checkpoint, unless it is the newest valid one, once every save before this call is committed."""
        remove(path)

    def raise_if_failed(self) -> None:
        """Raise the error of a write that failed; at every step boundary."""

    def close(self) -> None:
        """Wait until everything is committed; raise the error of a write that failed. More can be saved afterwards."""

    def abandon(self) -> None:
        """Note that the run has failed: `close` waits some seconds more for other ranks, which may be dead."""

    def _encode(self, state: Mapping[str, Any], mesh: Mapping[str, int] | None) -> EncodedState:
        return encode_state(state, mesh) if self._group is None else self._group.encode(state, mesh)

    def _write(self, path: Path, encoded: EncodedState) -> None:
        if self._group is None:
            write(path, encoded)
        else:
            self._group.write(path, encoded)


class AsyncWriter(Writer):
    """Writes in a thread; the caller waits only until the tensors are copied to buffers, which every save reuses.

    At most one write is in flight: a second `save` waits for the first. After a failed write, what was to follow it
    (links, removals) is dropped, and the error is raised by the next call of any method. With a `group`, each rank
    copies and writes what it owns, and all learn of an error of any.
    """

    def __init__(self, group: SavingGroup | None = None) -> None:
        super().__init__(group)
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._copied = threading.Event()
        self._copied.set()
        self._lock = threading.Lock()
        self._tasks: deque[Callable[[], object]] = deque()
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
        self.close()
        encoded = self._encode(state, mesh)
        staged = self._allocate(encoded)
        copies = [
            (part, staged[part][key].tensor, block.tensor)
            for part, blocks in encoded.blocks.items()
            for key, block in blocks.items()
        ]
        later = [(buffer, tensor) for part, buffer, tensor in copies if part in still]
        copy_all([(buffer, tensor) for part, buffer, tensor in copies if part not in still])
        self._copied.clear()
        self.is_copying = True
        staged_state = replace(encoded, blocks=staged)
        self._submit(functools.partial(self._copy_and_write, Path(path), staged_state, later, _now(later)))

    def wait_for_copy(self) -> None:
        self._copied.wait()
        self.is_copying = False

    def point(self, link: Path, path: Path) -> None:
        self._submit(functools.partial(point, link, path))

    def remove(self, path: Path) -> None:
        self._submit(functools.partial(remove, path))

    def raise_if_failed(self) -> None:
        with self._lock:
            self._raise()

    def close(self) -> None:
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()
        self.raise_if_failed()

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
                    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._buffers[part, key] = buffer
                staged[part][key] = Block(buffer, block.offsets)
        return staged

    def _copy_and_write(self, path: Path, encoded: EncodedState, later: Copies, ready: torch.cuda.Event | None) -> None:
        try:
            copy_all(later, ready)
            later.clear()
        finally:
            self._copied.set()
        self._write(path, encoded)

    def _submit(self, task: Callable[[], object]) -> None:
        with self._lock:
            self._raise()
            self._tasks.append(task)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="echelon-checkpoint")
                self._thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._tasks:
                    self._thread = None
                    return
                task = self._tasks.popleft()
            try:
                task()
            except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
                # logged here too, since a program that is ending calls no other method
                _logger.error("%s", error)
                with self._lock:
                    self._error, self.has_failed = error, True
                    self._tasks.clear()

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error, self.has_failed = self._error, None, False
            raise error


def make_writer(group: ProcessGroup | None, *, is_async: bool) -> Writer:
    """Return the writer of a run: in a thread or not, of one process or of all in a group. Collective."""
    saving_group = None if group is None else SavingGroup(group.store, group.rank, group.world_size)
    return AsyncWriter(saving_group) if is_async else Writer(saving_group)


def _now(copies: Copies) -> torch.cuda.Event | None:
    """Return an event after the work that the device has been given; a copy in another thread has to wait for it."""
    if not any(tensor.is_cuda for _, tensor in copies):
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def copy_all(copies: Copies, ready: torch.cuda.Event | None = None) -> None:
    """Copy tensors into their buffers, on a device after the event `ready`, and return when that is done."""
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
