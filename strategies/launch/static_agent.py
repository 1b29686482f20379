"""Agent of a run with a fixed set of nodes: one failure ends the run on every node."""

from __future__ import annotations

import contextlib
import logging
import signal

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState

from ..distributed.call_record import StuckRanks
from ..distributed.noticeboard import Noticeboard
from .agent import Agent
from .failures import WorkerExit
from .static_rendezvous import Rendezvous
from .worker import WorkerTask

_log = logging.getLogger(__name__)

_CONSEQUENCES = 0.25  # seconds to wait after a failure, to see whether a peer of the failed worker is dead
_LINGER = 5.0  # seconds for which node 0 keeps the store, so that other nodes learn how the run ended
_INTERVAL = 1.0  # seconds between two checks of other nodes; an exit on this node is noticed at once
_FAILURE = "failure"


class StaticAgent(Agent):
    """Ends all workers as soon as one fails, on this node or another."""

    def __init__(self, task: WorkerTask, num_processes: int, nodes: Rendezvous) -> None:
        super().__init__(task, num_processes, nodes)
        self.nodes = nodes
        self._others = [node for node in range(nodes.num_nodes) if node != nodes.node_rank]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
        pids = super()._start_workers(worker_group)
        self._stuck = StuckRanks({rank: self.task.calls_file(rank) for rank in self.ranks})
        return pids

    def cancel(self) -> None:
        self.nodes.cancel()

    def release(self) -> None:
        super().release()
        self.nodes.store = None

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._wait_for_an_end(_INTERVAL)
        if self._ended_without_result():
            self._wait(_CONSEQUENCES)
            self.failed = self._ended_without_result()
            self._exchange_failures(min(self.failed, key=lambda worker: worker.likelihood))
        elif self._running:
            self.failure_elsewhere = self._read_failure()
        if self.failed or self.failure_elsewhere is not None:
            self._stop()
            return RunResult(state=WorkerState.FAILED)
        if self._running:
            if (stuck := self._stuck.look()) is not None:
                _log.warning("%s", stuck)
            self.deadlock = self._stuck.deadlock()
            if self.deadlock is not None:
                self._tell_others(f"Node {self.nodes.node_rank} stopped its workers. {self.deadlock}")
                self._stop()
                return RunResult(state=WorkerState.FAILED)
            return RunResult(state=WorkerState.HEALTHY)
        return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(self.ranks))

    # --- several nodes: the agents' messages over the store ---

    @property
    def _board(self) -> Noticeboard:
        return Noticeboard(self.nodes.store, "agents")

    def _exchange_failures(self, cause: WorkerExit) -> None:
        """Post this node's failure for the others, unless it is the consequence of one that another node has posted."""
        if not self._others:
            return
        if cause.blames_a_peer:
            with contextlib.suppress(RuntimeError):  # node 0 is gone, which _read_failure() reports
                self._board.wait_for([_FAILURE], _LINGER)
            self.failure_elsewhere = self._read_failure()
        if self.failure_elsewhere is None:
            self._tell_others(cause.describe())

    def _tell_others(self, failure: str) -> None:
        if not self._others:
            return
        with contextlib.suppress(RuntimeError):  # node 0 is gone, and no one can read it
            self._board.post(_FAILURE, failure)
            if self.nodes.node_rank == 0:
                self._board.wait_for([f"read/{node}" for node in self._others], _LINGER)

    def _read_failure(self) -> str | None:
        """Return the failure that another node has posted, if any, and acknowledge it."""
        if not self._others:
            return None
        try:
            failure: str | None = self._board.read(_FAILURE)
            if failure is not None:
                self._board.post(f"read/{self.nodes.node_rank}")
        except RuntimeError:
            return f"Node 0 ({self.nodes.address}) ended without a message"
        return failure

    def _exit_barrier(self) -> None:
        """Wait for the other nodes; node 0, which hosts the store, leaves last. Elastic's barrier ignores failures."""
        if not self._others:
            return
        with contextlib.suppress(RuntimeError):
            if self.nodes.node_rank == 0:
                self.nodes.close()
            self._board.post(f"done/{self.nodes.node_rank}")
            self._board.wait_for([f"done/{node}" for node in self._others], until=lambda _: self._is_cut_short())
            if self._signal is signal.SIGKILL:
                return
            self._board.post(f"left/{self.nodes.node_rank}")
            if self.nodes.node_rank == 0:
                self._board.wait_for([f"left/{node}" for node in self._others], _LINGER)

    def _is_cut_short(self) -> bool:
        if self.failure_elsewhere is None:
            self.failure_elsewhere = self._read_failure()
        return self.failure_elsewhere is not None or self._signal is signal.SIGKILL
