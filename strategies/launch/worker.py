"""Worker process: it takes over its caller's settings, runs the function, and leaves the result in a file."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import multiprocessing
import os
import random
import re
import signal
import sys
import warnings
from dataclasses import dataclass, field
from multiprocessing import reduction
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from ..cluster.environment import NODE_FOLDER
from ..cluster.network import loopback_variables
from ..distributed.pickling import pack, unpack
from .failures import Failure

SHOW_STACKS: Final = signal.SIGUSR2
"""Makes a worker with `WorkerTask.shows_stacks` write the stack of each of its threads."""

NOT_FOR_THE_FORK_SERVER: Final = frozenset((signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
"""Signals that a terminal or a scheduler may send to the whole process group of a run."""

# Variables that torch.distributed.elastic sets for each worker; a caller that is a worker itself has them, too.
_WORKER_VARIABLES: Final = re.compile(
    "((GROUP|ROLE|LOCAL)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
    f"|TORCH_NCCL_ASYNC_ERROR_HANDLING|{NODE_FOLDER}"
)


class InheritedStream:
    """Descriptor of the caller of which each worker gets a duplicate; the fork server's own may be out of date."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_duplicate, (reduction.DupFd(self.number),)


def _from_duplicate(duplicate: Any) -> InheritedStream:
    return InheritedStream(duplicate.detach())


def _own_streams() -> dict[int, InheritedStream]:
    streams = {}
    for number in (1, 2):
        with contextlib.suppress(OSError):  # closed, as a daemon's may be
            os.fstat(number)
            streams[number] = InheritedStream(number)
    return streams


@dataclass(frozen=True)
class WorkerTask:
    """Task of the workers of a run; the function itself is a file in the folder."""

    folder: Path
    is_local: bool
    """Whether all processes are on this machine."""
    keeps_all_results: bool
    """Whether to keep every worker's result, or only that of the node's first one."""
    shows_stacks: bool = False
    modules: tuple[str, ...] = ()
    """Modules of installed packages that the function imports."""
    node_folder: Path | None = None
    """Folder that outlives the workers, if they are started again after a failure."""
    streams: dict[int, InheritedStream] = field(default_factory=_own_streams)
    """Standard output and standard error of the caller."""


@dataclass(frozen=True)
class CallerState:
    """State of the caller's process that its workers take over."""

    environ: dict[str, str]
    default_dtype: torch.dtype
    matmul_precision: str
    is_deterministic: bool
    warns_only: bool
    warning_filters: list[Any]
    start_method: str | None
    """Start method of multiprocessing, for the workers of a DataLoader; None if the caller has chosen none."""
    sharing_strategy: str
    python_random: Any
    numpy_random: Any
    torch_random: torch.Tensor

    @classmethod
    def of_this_process(cls) -> Self:
        """Return the state of the caller."""
        return cls(
            environ=dict(os.environ),
            default_dtype=torch.get_default_dtype(),
            matmul_precision=torch.get_float32_matmul_precision(),
            is_deterministic=torch.are_deterministic_algorithms_enabled(),
            warns_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            warning_filters=list(warnings.filters),
            start_method=multiprocessing.get_start_method(allow_none=True),
            sharing_strategy=torch.multiprocessing.get_sharing_strategy(),
            python_random=random.getstate(),
            numpy_random=sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None,
            torch_random=torch.get_rng_state(),
        )

    def apply(self, *, is_local: bool) -> None:
        """Make this process like the caller's."""
        variables = loopback_variables() if is_local else {}
        variables |= {name: value for name, value in self.environ.items() if not _WORKER_VARIABLES.fullmatch(name)}
        # A variable that the caller does not have was set when the fork server was started.
        for name in set(os.environ) - set(variables):
            if not _WORKER_VARIABLES.fullmatch(name):
                del os.environ[name]
        os.environ.update(variables)
        torch.set_default_dtype(self.default_dtype)
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.use_deterministic_algorithms(self.is_deterministic, warn_only=self.warns_only)
        torch.set_num_threads(threads_per_process(int(os.environ["LOCAL_WORLD_SIZE"])))
        warnings.resetwarnings()  # it also clears the module's cache of filters
        warnings.filters.extend(self.warning_filters)  # type: ignore[attr-defined]
        # This process has the fork server's start method, whose children cannot import classes of the user's program.
        # Forked children have them; so fork is the default.
        is_linux = sys.platform == "linux"
        multiprocessing.set_start_method(self.start_method or ("fork" if is_linux else None), force=True)
        torch.multiprocessing.set_sharing_strategy(self.sharing_strategy)
        random.setstate(self.python_random)
        if self.numpy_random is not None:
            sys.modules["numpy"].random.set_state(self.numpy_random)
        torch.set_rng_state(self.torch_random)


def run_worker(task: WorkerTask) -> None:
    """Run the function of `task` in this process, and leave its result or its failure in the folder."""
    _end_with_the_caller()
    # A terminal's Ctrl-C reaches every process of the group; the caller decides what it means for the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number, stream in task.streams.items():
        os.dup2(stream.number, number)
        if stream.number > 2:
            os.close(stream.number)
    rank = os.environ["RANK"]
    try:
        stacks = (task.folder / f"{rank}.stacks").open("w") if task.shows_stacks else None
        if stacks is not None:
            faulthandler.register(SHOW_STACKS, stacks)
        unpack((task.folder / "settings").read_bytes()).apply(is_local=task.is_local)
        if task.node_folder is not None:
            os.environ[NODE_FOLDER] = str(task.node_folder)
        result = unpack((task.folder / "function").read_bytes())()
        is_kept = task.keeps_all_results or os.environ["LOCAL_RANK"] == "0"
        _write(task.folder / f"{rank}.result", pack(result if is_kept else None, "result"))
    except BaseException as error:  # noqa: BLE001 - a sys.exit() of the function would pass for success
        _write(task.folder / f"{rank}.failure", pack(Failure.of(error)))
        _leave_at_once()
    # Returning would make elastic wait until all workers have returned; it accepts an exit without a code.
    sys.exit()


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".part")
    temporary.write_bytes(data)
    temporary.rename(path)


def _leave_at_once() -> None:
    """Exit without unwinding: threads and process groups of a failed function may wait for peers for ever."""
    for child in multiprocessing.active_children():
        child.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _end_with_the_caller() -> None:
    """Make the kernel kill this process as soon as the caller is gone, even if SIGKILL ended it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    _prctl_pr_set_pdeathsig(signal.SIGKILL)  # the fork server may be killed alone
    if hasattr(fcntl, "F_SETSIG"):  # Linux
        # The fork server, the parent of this process, outlives the caller as long as it has a child. But only the
        # caller holds the other end of this pipe open.
        pipe = parent.sentinel
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if not parent.is_alive():
        os._exit(1)


def threads_per_process(num_processes: int) -> int:
    """Return the number of threads for each of `num_processes` that share the cores which this one may use."""
    if (setting := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        return max(1, int(setting))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // num_processes)
