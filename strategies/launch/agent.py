"""Agent of torch.distributed.elastic that starts and watches the workers of this node."""

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
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, Final

from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing import api as elastic_processes
from torch.distributed.elastic.rendezvous import RendezvousHandler

from ..errors import ProcessError
from .failures import WorkerExit
from .proc_status import look_at
from .worker import NOT_FOR_THE_FORK_SERVER, WorkerTask, run_worker

_REPORT_TIMEOUT = 2.0  # seconds in which the fork server reports the exit code of a worker that is gone
_UNKNOWN = 255  # the exit code that multiprocessing gives to a process whose fork server is gone
_GRACE = 2.0  # seconds between SIGTERM and SIGKILL for workers whose peer failed
# the first optimizer imports torch._dynamo, which takes a second
PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.optim",
    "cloudpickle",
    "echelon",
    f"{__package__}.forkserver_preload",
)


class Agent(LocalElasticAgent):
    """Starts workers from the fork server, watches and ends them; a subclass decides what follows when one exits.

    Results and failures are files in the task's folder; elastic's queues and error files are not used.

    Args:
        task: what each worker does.
        num_processes: the number of workers on this node.
        rendezvous: has the agents of all nodes meet before workers start.
        max_restarts: how often elastic may start the workers again.
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
            monitor_interval=0.001,  # _monitor_workers() waits by itself
        )
        super().__init__(spec, _InheritedStreams(), start_method="forkserver")
        self.folder, self._modules = task.folder, task.modules
        self.ranks: list[int] = []
        self.failed: list[WorkerExit] = []
        """The workers of this node that failed; not those that were stopped because another had."""
        self.failure_elsewhere: str | None = None
        """The failure of a worker of another node, if that ended the run."""
        self.report: str | None = None
        """A note on the run as a whole, for the error that ended it."""
        self.has_started = threading.Event()
        self._processes: list[Any] = []
        self._running: dict[int, int] = {}
        self._signal: signal.Signals | None = None

    @abstractmethod
    def cancel(self) -> None:
        """End the wait for other nodes; from any thread."""

    @abstractmethod
    def release(self) -> None:
        """Release the store, so that its port is free for the next run."""

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all running workers, and end the wait for other nodes; from any thread."""
        self._signal = number
        self.cancel()
        self._signal_workers(number)

    def _signal_workers(self, number: signal.Signals) -> None:
        for pid in list(self._running.values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    @property
    def running(self) -> list[int]:
        """The ranks of this node that have not ended."""
        return list(self._running)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        preload(self._modules)
        with blank_main(), _without_signal_warning():
            try:
                pids: dict[int, Any] = super()._start_workers(worker_group)
            except (EOFError, ConnectionError) as error:
                raise ProcessError(
                    f"The fork server ended while it started the workers of this node ({error!r}); start the run "
                    "again. If the kernel's out-of-memory killer ended it (see dmesg), use less memory per process."
                ) from error
        assert self._pcontext is not None
        self._processes = list(self._pcontext._pc.processes)  # type: ignore[attr-defined]  # noqa: SLF001 - for their exit codes
        self.ranks = [worker.global_rank for worker in worker_group.workers]
        self._running = dict(zip(self.ranks, pids.values(), strict=True))
        if self._signal is not None:
            self.send(self._signal)
        self.has_started.set()
        return pids

    def _wait_for_an_end(self, seconds: float) -> None:
        """Return when a worker has exited, at the latest after `seconds`."""
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
        """End all workers, by SIGKILL after `grace` seconds."""
        for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, _GRACE)):
            self._signal_workers(number)
            self._wait(seconds)
            self._ended_without_result()


class _InheritedStreams(LogsSpecs):
    """Log settings with which workers write where the caller writes."""

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

    The fork server reports it through a pipe. Where it cannot, because it was stopped, or killed while another process
    holds the pipe open, waiting for a worker that is gone would never end.
    """
    if process.exitcode is None and look_at(process.pid).state == "ended":
        process.join(_REPORT_TIMEOUT)
        if process.exitcode is None:
            process._popen.returncode = _UNKNOWN  # noqa: SLF001 - elastic would wait for it, too
    code: int | None = process.exitcode
    return code


def preload(modules: Iterable[str]) -> None:
    """Start the fork server, unless it runs, and have it import the modules that each worker needs."""
    from multiprocessing import forkserver, resource_tracker

    users = forkserver._forkserver._preload_modules  # type: ignore[attr-defined]  # noqa: SLF001 - there is no getter
    # __main__, a default, is the user's program, which would run once more
    others = [name for name in dict.fromkeys((*users, *modules)) if name != "__main__" and name not in PRELOADED]
    multiprocessing.set_forkserver_preload([*PRELOADED, *others])
    resource_tracker.ensure_running()  # the fork server would start it, which unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_THE_FORK_SERVER)  # inherited by the fork server
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_ONE_THREAD: Final = threading.Lock()


@contextlib.contextmanager
def blank_main() -> Iterator[None]:
    """Hide the user's program from multiprocessing, which would make each child run it again to import it.

    In one thread at a time: another would take the blank module for the program, and leave it there.
    """
    with _ONE_THREAD:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


@contextlib.contextmanager
def _without_signal_warning() -> Iterator[None]:
    """Silence elastic's warning that it handles no signals in a thread: the launcher handles them."""

    def is_useful(record: logging.LogRecord) -> bool:
        return "child thread" not in record.getMessage()

    elastic_processes.logger.addFilter(is_useful)
    try:
        yield
    finally:
        elastic_processes.logger.removeFilter(is_useful)
