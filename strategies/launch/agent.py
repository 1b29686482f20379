"""Agent of torch.distributed.elastic that starts and watches the workers of this node."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing import api as elastic_processes
from torch.distributed.elastic.rendezvous import RendezvousHandler

from ...common.errors import ProcessError
from ...common.internals.processes import set_exit_code
from ...common.proc_status import look_at
from ..torch_internals.distributed import list_processes
from .failures import WorkerExit
from .fork_server import blank_main, keeping_start_method, preload_modules
from .worker import WorkerTask, run_worker

_log = logging.getLogger(__name__)

_REPORT_TIMEOUT = 2.0  # seconds for the fork server to report the exit code of a worker that is gone
_UNKNOWN = 255  # the exit code that multiprocessing gives to a process whose fork server is gone
_GRACE = 2.0  # seconds between SIGTERM and SIGKILL for workers whose peer failed
_REMINDER = 10.0  # seconds between two warnings about workers that have not exited
_LONGEST_EXIT = 600.0  # seconds after SIGKILL during which a driver may still be freeing a worker's memory


class Agent(LocalElasticAgent):
    """Starts workers from the fork server, watches and ends them; subclasses decide what happens when one exits.

    Results and failures are files in the task's folder; elastic's queues and error files are not used.

    Args:
        task: what each worker does.
        num_processes: the number of workers on this node.
        rendezvous: brings the agents of all nodes together before workers start.
        max_restarts: how often elastic may restart the workers.
    """

    def __init__(
        self, task: WorkerTask, num_processes: int, rendezvous: RendezvousHandler, *, max_restarts: int = 0
    ) -> None:
        spec = WorkerSpec(
            role="echelon",
            local_world_size=num_processes,
            entrypoint=run_worker,
            args=(task,),
            rdzv_handler=rendezvous,
            max_restarts=max_restarts,
            monitor_interval=0.001,  # _monitor_workers() does its own waiting
        )
        super().__init__(spec, _InheritedStreams(), start_method="forkserver")
        self.task, self.folder, self._modules, self._uses_devices = task, task.folder, task.modules, task.uses_devices
        self.ranks: list[int] = []
        self.failed: list[WorkerExit] = []
        """The workers of this node that failed, without those that were stopped because another one failed."""
        self.failure_elsewhere: str | None = None
        self.deadlock: str | None = None
        """The calls that differ between ranks, none of which can go on, so that all were stopped."""
        """The failure of a worker on another node, if that ended the run."""
        self.report: str | None = None
        """A note on the run as a whole, for the error that ended it."""
        self.has_started = threading.Event()
        self._processes: list[Any] = []
        self._running: dict[int, int] = {}
        self._signal: signal.Signals | None = None

    @abstractmethod
    def cancel(self) -> None:
        """End the wait for other nodes; may be called from any thread."""

    def release(self) -> None:
        """Close the store, to free its port for the next run, and the workers' pipes and semaphores.

        Otherwise they would stay open as long as a caller keeps the run's error, whose frames hold this agent.
        """
        self._store = self._worker_group.store = self._pcontext = None
        for process in self._processes:
            if process.exitcode is not None:
                process.join()  # otherwise multiprocessing keeps it among its children
        self._processes.clear()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all running workers, and end the wait for other nodes; may be called from any thread."""
        self._signal = number
        self.cancel()
        self._signal_workers(number)

    def _signal_workers(self, number: signal.Signals) -> None:
        for pid in list(self._running.values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    @property
    def running(self) -> dict[int, int]:
        """The ranks on this node that have not ended, each with the number of its process."""
        return dict(self._running)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
        preload_modules(self._modules, uses_devices=self._uses_devices)
        with blank_main(), keeping_start_method(), _without_signal_warning():
            try:
                pids: dict[int, Any] = super()._start_workers(worker_group)
            except (EOFError, ConnectionError) as error:
                raise ProcessError(
                    f"The fork server ended while it started the workers of this node ({error!r}); start the run "
                    "again. If the kernel's out-of-memory killer ended it (see dmesg), use less memory per process."
                ) from error
        assert self._pcontext is not None
        self._processes = list_processes(self._pcontext)
        self.ranks = [worker.global_rank for worker in worker_group.workers]
        self._running = dict(zip(self.ranks, pids.values(), strict=True))
        if self._signal is not None:
            self.send(self._signal)
        self.has_started.set()
        return pids

    def _wait_for_an_end(self, seconds: float) -> None:
        """Wait until a worker exits, but at most `seconds`."""
        sentinels = [process.sentinel for process in self._processes if process.exitcode is None]
        multiprocessing.connection.wait(sentinels, timeout=seconds)

    def _ended_without_result(self) -> list[WorkerExit]:
        exits = []
        for rank, process in zip(self.ranks, self._processes, strict=True):
            exit_code = _exit_code(process)
            if exit_code is None:
                continue
            self._running.pop(rank, None)
            if not (self.folder / f"{rank}.result").exists():
                world_size = self._worker_group.workers[0].world_size
                exits.append(WorkerExit.read(self.folder, rank, world_size, process.pid, exit_code))
        return exits

    def _wait(self, seconds: float) -> None:
        """Wait until all workers have exited, for at most `seconds`."""
        end = time.monotonic() + seconds
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))

    def _stop(self, grace: float = _GRACE) -> None:
        """End all workers, by SIGKILL after `grace` seconds, and wait until they are gone.

        A GPU's memory is only free once the process that used it has exited: workers that started too soon would find
        it full.
        """
        self._signal_workers(signal.SIGTERM)
        self._wait(grace)
        self._ended_without_result()
        self._signal_workers(signal.SIGKILL)
        end = time.monotonic() + _LONGEST_EXIT
        while True:
            self._wait(_REMINDER)
            self._ended_without_result()
            if not self._running or time.monotonic() > end:
                return
            _log.warning(
                "Waiting for the exit of %s, which SIGKILL has not ended yet: a GPU driver may take a long time to "
                "free its memory.",
                ", ".join(f"rank {rank} (process {pid})" for rank, pid in self._running.items()),
            )


class _InheritedStreams(LogsSpecs):
    """Log settings that let workers write to the caller's streams."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        nowhere = dict.fromkeys(envs, "")
        for variables in envs.values():
            variables["TORCHELASTIC_ERROR_FILE"] = ""
        return LogsDest(stdouts=nowhere, stderrs=nowhere, error_files=nowhere)

    @property
    def root_log_dir(self) -> str:
        return ""


def _exit_code(process: Any) -> int | None:
    """Return the exit code of a worker; None while it runs.

    The fork server reports it through a pipe. If it cannot, because it was stopped, or killed while another process
    holds the pipe open, waiting for a worker that is gone would never end.
    """
    if process.exitcode is None and look_at(process.pid).state == "ended":
        process.join(_REPORT_TIMEOUT)
        if process.exitcode is None:
            set_exit_code(process, _UNKNOWN)  # elastic would wait for it, too
    code: int | None = process.exitcode
    return code


@contextlib.contextmanager
def _without_signal_warning() -> Iterator[None]:
    """Silence elastic's warning that it does not handle signals in a thread; the launcher does."""

    def is_useful(record: logging.LogRecord) -> bool:
        return "child thread" not in record.getMessage()

    elastic_processes.logger.addFilter(is_useful)
    try:
        yield
    finally:
        elastic_processes.logger.removeFilter(is_useful)
