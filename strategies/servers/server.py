"""Server: answers the requests of trainers, in a process of its own."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor

from ..launch.worker import threads_per_process
from .held import HeldOptimizer
from .meeting import Meeting
from .messages import Assignment, Push, Update, Updated
from .staleness import StalenessBound
from .transport import Peers, server_name

LOST_PEERS: Final = 75
"""Exit code of a server that did not meet the others: another process is to blame."""


@dataclass(frozen=True)
class ServerTask:
    """The data that a server gets when it starts."""

    index: int
    peers: Peers
    meeting: Meeting
    start_timeout: timedelta
    max_staleness: int | None
    """In async mode; None in sync mode."""
    num_neighbours: int
    """How many processes of the run share this machine's cores."""


def run_server(task: ServerTask) -> None:
    """Serve until this process is killed."""
    torch.set_num_threads(threads_per_process(task.num_neighbours))
    service = Server(task.peers.num_trainers, task.max_staleness)
    try:
        task.meeting.join(server_name(task.index), task.peers, service, task.start_timeout)
    except (ConnectionError, RuntimeError) as error:
        sys.stderr.write(f"Server {task.index} of {task.peers.num_servers} did not meet the others: {error}\n")
        sys.stderr.flush()
        os._exit(LOST_PEERS)
    threading.Event().wait()


class Server:
    """The parameters and optimizers of this server. Requests come in the transport's threads, and are handled in turn.

    Args:
        num_trainers: the number of trainers.
        max_staleness: see `StalenessBound`; None for sync mode.
    """

    def __init__(self, num_trainers: int, max_staleness: int | None) -> None:
        self._num_trainers, self._max_staleness = num_trainers, max_staleness
        self._optimizers: dict[int, HeldOptimizer] = {}
        self._bounds: dict[int, StalenessBound] = {}
        self._tables: dict[str, Tensor] = {}
        self._lock = threading.Lock()

    def answer(self, request: str, arguments: tuple[object, ...]) -> object:
        """Answer a request, which is the name of one of the methods below without its underscore."""
        if request == "ping":
            return self._missing()
        with self._lock:
            return getattr(self, f"_{request}")(*arguments)

    def _end(self) -> None:
        """Silence the warnings that the transport prints when trainers leave."""
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 2)
        os.close(silence)

    def _missing(self) -> list[int]:
        """Return the trainers that others wait for."""
        missing = [held.missing for held in list(self._optimizers.values())]
        missing += [bound.missing for bound in list(self._bounds.values())]
        return sorted({rank for ranks in missing for rank in ranks})

    def _assign(self, key: int, assignment: Assignment) -> None:
        values = {name: self._tables.get(name, value) for name, value in assignment.values.items()}
        held = HeldOptimizer(_with_values(assignment, values), self._num_trainers)
        self._optimizers[key] = held
        if self._max_staleness is not None and key not in self._bounds:
            self._bounds[key] = StalenessBound(self._num_trainers, self._max_staleness)

    def _hold(self, tables: Mapping[str, Tensor]) -> None:
        """Hold tables, or overwrite those that are held in place, as optimizers hold the same tensors."""
        for name, values in tables.items():
            if name in self._tables:
                self._tables[name].copy_(values)
            else:
                self._tables[name] = values.contiguous()

    def _rows(self, name: str, ids: Tensor) -> Tensor:
        return self._tables[name].index_select(0, ids)

    def _table(self, name: str) -> Tensor:
        return self._tables[name]

    def _push(self, key: int, push: Push) -> Future[Any]:
        held = self._optimizers[key]
        if self._max_staleness is None:
            return held.gather(push)
        bound = self._bounds[key]
        held.apply(push)
        bound.note(push.trainer)
        answer = bound.wait(push.trainer)
        for released in bound.released():
            released.set_result(Updated(held.copy(), [], staleness=bound.totals))
        return answer

    def _update(self, key: int, update: Update) -> Updated:
        return self._optimizers[key].update(update)

    def _set_values(self, key: int, flats: list[Tensor]) -> None:
        self._optimizers[key].set_values(flats)

    def _values(self, key: int) -> list[Tensor]:
        return self._optimizers[key].copy()

    def _state(self, key: int, names: list[str]) -> dict[str, dict[str, Any]]:
        return self._optimizers[key].state(names)

    def _ledger(self, key: int) -> Tensor:
        return self._bounds[key].ledger()


def _with_values(assignment: Assignment, values: Mapping[str, Tensor]) -> Assignment:
    return Assignment(
        optimizer=assignment.optimizer,
        groups=assignment.groups,
        trained=assignment.trained,
        sparse=assignment.sparse,
        values=values,
        state=assignment.state,
    )
