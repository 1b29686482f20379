"""The agent of torch.distributed.elastic that starts and watches the workers of this node."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing import api as elastic_processes

from . import worker
from .failures import End
from .rendezvous import Rendezvous

_GRACE = 2.0  # seconds between SIGTERM and SIGKILL for workers of which another failed
_SETTLE = 0.25  # seconds in which a peer whose loss was felt is seen to be dead
_LINGER = 5.0  # seconds for which node 0 keeps the store, so that other nodes hear how the run ended
_LOOK = 1.0  # seconds after which the agent looks at other nodes; the end of a worker of this one it sees at once
# torch._dynamo is imported by the first optimizer, and costs a second
_PRELOADED = ("torch", "torch._dynamo", "torch.distributed.optim", "cloudpickle", "echelon", f"{__package__}.preloaded")


class Agent(LocalElasticAgent):
    """Starts workers by the fork server; ends all of them as soon as one has failed, here or on another node.

    Results and failures are files in the job's folder; elastic's queues and error files are not used.
    """

    def __init__(self, job: worker.Job, num_processes: int, rendezvous: Rendezvous) -> None:
        spec = WorkerSpec(
            role="echelon",
            local_world_size=num_processes,
            entrypoint=worker.run,
            args=(job,),
            rdzv_handler=rendezvous,
            max_restarts=0,
            monitor_interval=0.001,  # the looking itself waits
        )
        super().__init__(spec, _Inherited(), start_method="forkserver")
        self.folder = job.folder
        self.nodes = rendezvous
        self.ranks: list[int] = []
        self.failed: list[End] = []
        """How workers of this node ended that were not stopped because of another."""
        self.failure_elsewhere: str | None = None
        """How a worker of another node failed, if that ended the run."""
        self.has_started = threading.Event()
        self._processes: list[Any] = []
        self._running: dict[int, int] = {}
        self._signal: signal.Signals | None = None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all workers that run, or else end the wait for other nodes; from any thread."""
        self._signal = number
        self.nodes.cancel()
        for pid in list(self._running.values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    @property
    def running(self) -> list[int]:
        """The ranks of this node that have not ended."""
        return list(self._running)

    def release(self) -> None:
        """Let go of the store, so that its port is free for the next run."""
        self._store = self._worker_group.store = self.nodes.store = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        _preload()
        with _blank_main(), _without_a_warning():
            pids: dict[int, Any] = super()._start_workers(worker_group)
        assert self._pcontext is not None
        self._processes = list(self._pcontext._pc.processes)  # type: ignore[attr-defined]  # noqa: SLF001 - their ends
        self.ranks = [one.global_rank for one in worker_group.workers]
        self._running = dict(zip(self.ranks, pids.values(), strict=True))
        if self._signal is not None:
            self.send(self._signal)
        self.has_started.set()
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        waiting_for = [one.sentinel for one in self._processes if one.exitcode is None]
        multiprocessing.connection.wait(waiting_for, timeout=_LOOK)
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

    def _ended_without_result(self) -> list[End]:
        ends = []
        for rank, process in zip(self.ranks, self._processes, strict=True):
            if process.exitcode is None:
                continue
            self._running.pop(rank, None)
            if not (self.folder / f"{rank}.result").exists():
                world_size = self._worker_group.workers[0].world_size
                ends.append(End.read(self.folder, rank, world_size, process.pid, process.exitcode))
        return ends

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))

    def _stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            self.send(number)
            self._wait(_GRACE)
            self._ended_without_result()

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


class _Inherited(LogsSpecs):
    """Workers write where the caller writes."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        nowhere = dict.fromkeys(envs, "")
        for variables in envs.values():
            variables["TORCHELASTIC_ERROR_FILE"] = ""
        return LogsDest(stdouts=nowhere, stderrs=nowhere, error_files=nowhere)

    @property
    def root_log_dir(self) -> str:
        return ""


def _preload() -> None:
    """Have the fork server import what each worker needs; it does so once, when it starts."""
    from multiprocessing import forkserver, resource_tracker

    own = forkserver._forkserver._preload_modules  # type: ignore[attr-defined]  # noqa: SLF001 - the only way to ask
    # __main__, there by default, is the user's program, which would run once more
    kept = [name for name in own if name != "__main__" and name not in _PRELOADED]
    multiprocessing.set_forkserver_preload([*_PRELOADED, *kept])
    resource_tracker.ensure_running()  # starting it, which the fork server would do, unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, worker.NOT_FOR_THE_FORK_SERVER)  # it inherits that
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _blank_main() -> Iterator[None]:
    """Hide the user's program from multiprocessing, which would have each child run it again to import it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _without_a_warning() -> Iterator[None]:
    """Silence elastic's warning that it handles no signals in a thread: the launcher does."""

    def is_of_use(record: logging.LogRecord) -> bool:
        return "child thread" not in record.getMessage()

    elastic_processes.logger.addFilter(is_of_use)
    try:
        yield
    finally:
        elastic_processes.logger.removeFilter(is_of_use)


def _wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + _LINGER
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
