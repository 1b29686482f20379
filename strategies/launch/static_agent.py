"""The agent of a run whose nodes are known beforehand: one failure ends it everywhere."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState

from . import worker
from .agent import Agent
from .failures import End
from .static_rendezvous import Rendezvous

_SETTLE = 0.25  # seconds in which a peer whose loss was felt is seen to be dead
_LINGER = 5.0  # seconds for which node 0 keeps the store, so that other nodes hear how the run ended
_LOOK = 1.0  # seconds after which the agent looks at other nodes; the end of a worker of this one it sees at once


class FixedAgent(Agent):
    """Ends all workers as soon as one has failed, here or on another node."""

    def __init__(self, job: worker.Job, num_processes: int, nodes: Rendezvous) -> None:
        super().__init__(job, num_processes, nodes)
        self.nodes = nodes

    def cancel(self) -> None:
        self.nodes.cancel()

    def release(self) -> None:
        self._store = self._worker_group.store = self.nodes.store = None

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._wait_for_an_end(_LOOK)
        if self._ended_without_result():
            self._wait(_SETTLE)
            self.failed = self._ended_without_result()
            self._settle_with_other_nodes(min(self.failed, key=lambda end: end.likelihood))
        elif self._running:
            self.failure_elsewhere = self._heard()
        if self.failed or self.failure_elsewhere is not None:
            self._stop()
            return RunResult(state=WorkerState.FAILED)
        if self._running:
            return RunResult(state=WorkerState.HEALTHY)
        return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(self.ranks))

    # --- several nodes: what one tells the others through the store ---

    def _settle_with_other_nodes(self, cause: End) -> None:
        """Learn from another node what made this one fail, or tell them that it has failed."""
        if self.nodes.num_nodes == 1:
            return
        if cause.blames_a_peer:
            _wait_until(lambda: self._heard() is not None)
            self.failure_elsewhere = self._heard()
        if self.failure_elsewhere is not None:
            return
        with contextlib.suppress(RuntimeError):  # node 0 is gone: nobody is left to be told
            self.nodes.store.set("failure", cause.describe())
            if self.nodes.node_rank == 0:
                others = [f"heard/{node}" for node in range(1, self.nodes.num_nodes)]
                _wait_until(lambda: bool(self.nodes.store.check(others)))

    def _heard(self) -> str | None:
        """Return the failure of which another node has told, if any."""
        if self.nodes.num_nodes == 1:
            return None
        try:
            if not self.nodes.store.check(["failure"]):
                return None
            self.nodes.store.set(f"heard/{self.nodes.node_rank}", "")
            return str(self.nodes.store.get("failure").decode())
        except RuntimeError:
            return f"Node 0 ({self.nodes.address}) ended without a word"

    def _exit_barrier(self) -> None:
        """Wait for the other nodes; node 0, which has the store, leaves last. Elastic's own knows no failures."""
        if self.nodes.num_nodes == 1:
            return
        with contextlib.suppress(RuntimeError):
            if self.nodes.node_rank == 0:
                self.nodes.close()
            self.nodes.store.add("done", 1)
            while self.nodes.store.add("done", 0) < self.nodes.num_nodes and self.failure_elsewhere is None:
                if self._signal is signal.SIGKILL:
                    return
                self.failure_elsewhere = self._heard()
                time.sleep(0.1)
            self.nodes.store.add("left", 1)
            if self.nodes.node_rank == 0:
                _wait_until(lambda: self.nodes.store.add("left", 0) == self.nodes.num_nodes)


def _wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + _LINGER
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
