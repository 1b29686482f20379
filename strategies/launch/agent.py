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
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing import api as elastic_processes
from torch.distributed.elastic.rendezvous import RendezvousHandler

from ..errors import ProcessError
from . import worker
from .failures import End
from .proc_status import look_at

_WORD = 2.0  # seconds in which the fork server tells how a worker has ended that is no more
_UNKNOWN = 255  # what multiprocessing says of a process whose fork server is gone
_GRACE = 2.0  # seconds between SIGTERM and SIGKILL for workers of which another failed
# torch._dynamo is imported by the first optimizer, and costs a second
_PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.optim",
    "cloudpickle",
    "echelon",
    f"{__package__}.forkserver_preload",
)


class Agent(LocalElasticAgent):
    """Starts workers by the fork server, watches and ends them; a subclass says what follows from their ends.

    Results and failures are files in the job's folder; elastic's queues and error files are not used.
    """

    def __init__(
        self, job: worker.Job, num_processes: int, meeting: RendezvousHandler, *, max_restarts: int = 0
    ) -> None:
        spec = WorkerSpec(
            role="echelon",
            local_world_size=num_processes,
            entrypoint=worker.run,
            args=(job,),
            rdzv_handler=meeting,
            max_restarts=max_restarts,
            monitor_interval=0.001,  # the looking itself waits
        )
        super().__init__(spec, _Inherited(), start_method="forkserver")
        self.folder, self._modules = job.folder, job.modules
        self.ranks: list[int] = []
        self.failed: list[End] = []
        """How workers of this node ended that were not stopped because of another."""
        self.failure_elsewhere: str | None = None
        """How a worker of another node failed, if that ended the run."""
        self.report: str | None = None
        """What is to be said of the run as a whole, beside the failure that ended it."""
        self.has_started = threading.Event()
        self._processes: list[Any] = []
        self._running: dict[int, int] = {}
        self._signal: signal.Signals | None = None

    @abstractmethod
    def cancel(self) -> None:
        """End the wait for other nodes; from any thread."""

    @abstractmethod
    def release(self) -> None:
        """Let go of the store, so that its port is free for the next run."""

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all workers that run, or else end the wait for other nodes; from any thread."""
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
        with blank_main(), _without_a_warning():
            try:
                pids: dict[int, Any] = super()._start_workers(worker_group)
            except (EOFError, ConnectionError) as error:
                raise ProcessError(
                    f"The fork server, which starts the workers of this node, ended while it did so ({error!r}); start "
                    "again. If the kernel's out-of-memory killer ended it (see dmesg), use less memory a process."
                ) from error
        assert self._pcontext is not None
        self._processes = list(self._pcontext._pc.processes)  # type: ignore[attr-defined]  # noqa: SLF001 - their ends
        self.ranks = [one.global_rank for one in worker_group.workers]
        self._running = dict(zip(self.ranks, pids.values(), strict=True))
        if self._signal is not None:
            self.send(self._signal)
        self.has_started.set()
        return pids

    def _wait_for_an_end(self, seconds: float) -> None:
        """Return when a worker has ended, or after so many seconds."""
        waiting_for = [one.sentinel for one in self._processes if one.exitcode is None]
        multiprocessing.connection.wait(waiting_for, timeout=seconds)

    def _ended_without_result(self) -> list[End]:
        ends = []
        for rank, process in zip(self.ranks, self._processes, strict=True):
            exit_code = _exit_code(process)
            if exit_code is None:
                continue
            self._running.pop(rank, None)
            if not (self.folder / f"{rank}.result").exists():
                world_size = self._worker_group.workers[0].world_size
                ends.append(End.read(self.folder, rank, world_size, process.pid, exit_code))
        return ends

    def _wait(self, seconds: float) -> None:
        """Wait until all workers have ended, at most so many seconds."""
        end = time.monotonic() + seconds
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))

    def _stop(self, grace: float = _GRACE) -> None:
        """End all workers, by force after so many seconds."""
        for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, _GRACE)):
            self._signal_workers(number)
            self._wait(seconds)
            self._ended_without_result()


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


def _exit_code(process: Any) -> int | None:
    """Return how a worker has ended; None while it runs.

    It is the fork server that tells, by a pipe. Where it cannot, because it was stopped or killed while somebody else
    has the pipe open, a worker that is no more would else be waited for without end.
    """
    if process.exitcode is None and look_at(process.pid).state == "ended":
        process.join(_WORD)
        if process.exitcode is None:
            process._popen.returncode = _UNKNOWN  # noqa: SLF001 - elastic, too, would wait for it
    code: int | None = process.exitcode
    return code


def preload(modules: Iterable[str]) -> None:
    """Have the fork server import what each worker needs; it does so once, when it starts."""
    from multiprocessing import forkserver, resource_tracker

    own = forkserver._forkserver._preload_modules  # type: ignore[attr-defined]  # noqa: SLF001 - the only way to ask
    # __main__, there by default, is the user's program, which would run once more
    kept = [name for name in dict.fromkeys((*own, *modules)) if name != "__main__" and name not in _PRELOADED]
    multiprocessing.set_forkserver_preload([*_PRELOADED, *kept])
    resource_tracker.ensure_running()  # starting it, which the fork server would do, unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, worker.NOT_FOR_THE_FORK_SERVER)  # it inherits that
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def blank_main() -> Iterator[None]:
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
