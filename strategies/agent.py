"""The agent of torch.distributed.elastic that starts and watches the workers of this node."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler

from . import worker

_GRACE = 2.0  # seconds between SIGTERM and SIGKILL for workers of which another failed
_SETTLE = 0.25  # seconds in which the loss of a peer is felt before that peer is seen to be dead
_PRELOADED = ("torch", "torch._dynamo", "torch.distributed.optim", "cloudpickle", "echelon", worker.__name__)


class Agent(LocalElasticAgent):
    """Starts workers by the fork server; ends all of them as soon as one has failed.

    Results and failures are files in the job's folder; elastic's queues and error files are not used.
    """

    def __init__(self, job: worker.Job, num_processes: int, rendezvous: RendezvousHandler) -> None:
        spec = WorkerSpec(
            role="echelon",
            local_world_size=num_processes,
            entrypoint=worker.run,
            args=(job,),
            rdzv_handler=rendezvous,
            max_restarts=0,
            monitor_interval=0.001,  # the watching itself waits
        )
        super().__init__(spec, _Inherited(), start_method="forkserver")
        self.folder = job.folder
        self.exit_codes: dict[int, int | None] = {}
        """By rank, of those that had ended by themselves when the agent looked last; None while they run."""
        self.pids: dict[int, int] = {}
        self._processes: list[Any] = []
        self._signal: signal.Signals | None = None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all workers, or as soon as they are started."""
        self._signal = number
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                if process.is_alive():
                    os.kill(process.pid, number)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        _preload()
        with _blank_main():
            pids = super()._start_workers(worker_group)
        assert self._pcontext is not None
        self._processes = list(self._pcontext._pc.processes)  # type: ignore[attr-defined]  # noqa: SLF001 - exit codes
        self.pids = {one.global_rank: pids[one.local_rank] for one in worker_group.workers}
        if self._signal is not None:
            self.send(self._signal)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        running = [process.sentinel for process in self._processes if process.exitcode is None]
        multiprocessing.connection.wait(running, timeout=1.0)
        if self._failed():
            self._wait(_SETTLE)
            self._look()
            self._stop()
            return RunResult(state=WorkerState.FAILED)
        if all(code == 0 for code in self.exit_codes.values()):
            return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(self.pids))
        return RunResult(state=WorkerState.HEALTHY)

    def _look(self) -> None:
        self.exit_codes = {rank: one.exitcode for rank, one in zip(self.pids, self._processes, strict=True)}

    def _failed(self) -> bool:
        self._look()
        return any(
            code is not None and not (self.folder / f"{rank}.result").exists() for rank, code in self.exit_codes.items()
        )

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))

    def _stop(self) -> None:
        self.send(signal.SIGTERM)
        self._wait(_GRACE)
        self.send(signal.SIGKILL)
        self._wait(_GRACE)


class _Inherited(LogsSpecs):
    """Workers write where the caller writes."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        nothing = dict.fromkeys(envs, "")
        for variables in envs.values():
            variables["TORCHELASTIC_ERROR_FILE"] = ""
        return LogsDest(stdouts=nothing, stderrs=nothing, error_files=nothing)

    @property
    def root_log_dir(self) -> str:
        return ""


def _preload() -> None:
    """Have the fork server import what each worker needs; it does so once, when it starts."""
    from multiprocessing import forkserver

    own = forkserver._forkserver._preload_modules  # type: ignore[attr-defined]  # noqa: SLF001 - the only way to ask
    # __main__, the default, is the user's program, which would run once more
    kept = [name for name in own if name != "__main__" and name not in _PRELOADED]
    multiprocessing.set_forkserver_preload([*_PRELOADED, *kept])


@contextlib.contextmanager
def _blank_main() -> Iterator[None]:
    """Hide the user's program from multiprocessing, which would have each child run it again to import it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
