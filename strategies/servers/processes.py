"""Processes of servers: a nursery forks them, free of the threads and locks of the trainer that asks for them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from ...common.errors import ProcessError
from ...common.proc_status import look_at
from ..cluster.environment import hide_gpus
from ..launch.fork_server import blank_main, preload_modules
from ..launch.worker import end_with_the_caller, makes_devices_unusable
from ..torch_internals.distributed import kill_with_parent

_PATIENCE: Final = 10.0  # seconds for an answer from the nursery
_LOOKS: Final = 5  # one a second, that find it stopped
_FIRST: Final = 60.0  # for its first one, if it has to import torch before it

_NURSERIES: Final[list[Nursery]] = []
"""The nursery of this process, which serves one run after another."""


class Nursery:
    """A process without threads that forks servers at once; a new interpreter would have to import torch first.

    It is a fork of this process if this has one thread only, as a worker of a launch at its start; no lock is held
    then by a thread that the copy lacks. Otherwise, and if this process has asked for GPUs, after which optimizers
    (torch 2.14) do not step in a fork, multiprocessing's fork server starts it. It ends with this process, and its
    servers with it, whatever ends them: the kernel sees to it.
    """

    def __init__(self) -> None:
        self.is_forked = _can_fork()
        self._pipe, theirs = multiprocessing.Pipe()
        self._lock = threading.Lock()
        self._patience = _PATIENCE if self.is_forked else _FIRST
        if self.is_forked:
            context: Any = multiprocessing.get_context("fork")
        else:
            preload_modules(())
            context = multiprocessing.get_context("forkserver")
        with blank_main():
            self.process = context.Process(target=_tend_servers, args=(theirs,), daemon=True, name="echelon-servers")
            self.process.start()
        theirs.close()

    def ask(self, request: str, *arguments: object) -> Any:
        """Return the answer of the process.

        Raises:
            ProcessError: if it is gone.
        """
        with self._lock:
            try:
                self._pipe.send((request, *arguments))
                if self._answers():
                    self._patience = _PATIENCE
                    return self._pipe.recv()
                self.process.kill()  # a late answer would be taken for the answer to the next request
                raise ProcessError(
                    f"The process that starts the servers (process {self.process.pid}) does not answer within "
                    f"{self._patience:g} s, or was stopped by a signal for {_LOOKS} s; it may also be that the machine "
                    "is swapping. Start the run again."
                )
            except (EOFError, OSError) as error:
                raise ProcessError(
                    f"The process that starts the servers (process {self.process.pid}) has ended ({error!r}), and the "
                    "servers with it; start the run again. dmesg shows whether it was the kernel's out-of-memory "
                    "killer."
                ) from error

    def _answers(self) -> bool:
        """Wait for an answer; in vain if the process is slow, or found stopped by a signal too often in a row.

        Looks count rather than time: whoever suspends the whole run and resumes it later stops this process as well.
        """
        end, num_stopped = time.monotonic() + self._patience, 0
        while not self._pipe.poll(1.0):
            num_stopped = num_stopped + 1 if look_at(self.process.pid).state == "stopped" else 0
            if num_stopped >= _LOOKS or time.monotonic() > end:
                return False
        return True

    def stop(self) -> None:
        """End the process, and any servers that are left."""
        self.process.kill()
        self.process.join()
        self._pipe.close()


@dataclass
class ServerProcesses:
    """The servers that this process has started."""

    nursery: Nursery
    pids: dict[int, int]
    """The process ids, by the servers' numbers."""
    _num_stopped: dict[int, int] = field(default_factory=dict)

    @classmethod
    def start(cls, function: Callable[..., None], servers: dict[int, Any]) -> ServerProcesses:
        """Start a process for each of these servers, which calls `function` with the argument given for it.

        Raises:
            ProcessError: if none can be started.
        """
        nursery = nursery_of_this_process()
        return cls(nursery, {index: nursery.ask("start", function, argument) for index, argument in servers.items()})

    def exit_code(self, index: int) -> int | None:
        """Return how a server of this process has ended; None if it is running, or another process started it."""
        return self.nursery.ask("exit_code", self.pids[index]) if index in self.pids else None

    def stopped_for(self, num_looks: float) -> int | None:
        """Return a server that this call has found stopped by a signal more than `num_looks` times in a row.

        Calls count rather than time: whoever suspends the whole run and resumes it later stops this process as well.
        """
        for index, pid in self.pids.items():
            is_stopped = look_at(pid).state == "stopped"
            self._num_stopped[index] = self._num_stopped.get(index, 0) + 1 if is_stopped else 0
        return next((index for index, number in self._num_stopped.items() if number > num_looks), None)

    def end(self) -> None:
        """End all servers."""
        is_kept = self.nursery.is_forked
        try:
            for pid in self.pids.values():
                self.nursery.ask("kill", pid)
        except ProcessError:  # the nursery is gone, or stopped
            is_kept = False
        if not is_kept:
            _NURSERIES.clear()
            self.nursery.stop()  # and the kernel ends its servers


def prepare_nursery() -> None:
    """Make the nursery of this process while that costs nothing: as long as it can be a fork."""
    if not _NURSERIES and _can_fork():
        _NURSERIES.append(Nursery())


def nursery_of_this_process() -> Nursery:
    """Return the nursery of this process; create it if there is none."""
    if _NURSERIES and not _NURSERIES[0].process.is_alive():
        _NURSERIES.clear()
    if not _NURSERIES:
        _NURSERIES.append(Nursery())
    return _NURSERIES[0]


def _can_fork() -> bool:
    return _num_threads() == 1 and not makes_devices_unusable()


def _num_threads() -> int:
    """Return the number of threads of this process, those of libraries included; 2 if it cannot be known."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 2


# --- in the nursery --------------------------------------------------------------------------------------------------


def _tend_servers(pipe: Connection) -> None:
    """Fork servers and report how they end, until the parent of this process is gone."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)  # the trainer's handler would ask for a checkpoint
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_the_caller()
    hide_gpus()  # servers compute on the CPU, but optimizers would look at a GPU in each step, and take memory there
    exit_codes: dict[int, int | None] = {}
    while True:
        try:
            request, *arguments = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        if request == "start":
            pid = _fork_server(*arguments)
            exit_codes[pid] = None
            pipe.send(pid)
            continue
        [pid] = arguments
        if request == "kill" and exit_codes[pid] is None:
            os.kill(pid, signal.SIGKILL)
        if exit_codes[pid] is None:
            ended, status = os.waitpid(pid, 0 if request == "kill" else os.WNOHANG)
            exit_codes[pid] = os.waitstatus_to_exitcode(status) if ended else None
        pipe.send(exit_codes[pid])


def _fork_server(function: Callable[..., None], argument: object) -> int:
    nursery = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        kill_with_parent(signal.SIGKILL)
        if os.getppid() == nursery:
            function(argument)
            code = 0
    except BaseException:  # noqa: BLE001 - if the error left this function, the process would go on as the nursery
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
