"""One worker process: it becomes like its caller, runs the function, and leaves what came of it in a file."""

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
"""Has a worker whose job says so write where each of its threads stands."""

NOT_FOR_THE_FORK_SERVER: Final = frozenset((signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
"""Signals that may be sent to the whole process group of a run."""

# What torch.distributed.elastic tells each worker; a caller that is a worker itself has variables of the same names.
_OF_A_WORKER: Final = re.compile(
    "((GROUP|ROLE|LOCAL)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
    f"|TORCH_NCCL_ASYNC_ERROR_HANDLING|{NODE_FOLDER}"
)


class Stream:
    """A descriptor of the caller that each worker gets a duplicate of; the fork server's own may be of another time."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.number),)


def _received(duplicate: Any) -> Stream:
    return Stream(duplicate.detach())


def _own_streams() -> dict[int, Stream]:
    streams = {}
    for number in (1, 2):
        with contextlib.suppress(OSError):  # closed, as a daemon's may be
            os.fstat(number)
            streams[number] = Stream(number)
    return streams


@dataclass(frozen=True)
class Job:
    """What a worker is told at its start; the function itself lies in the folder."""

    folder: Path
    is_local: bool
    """Whether all processes are on this machine."""
    keeps_all_results: bool
    """Whether every worker's result is wanted, or only the first one's."""
    shows_stacks: bool = False
    modules: tuple[str, ...] = ()
    """What the function imports, of installed packages."""
    node_folder: Path | None = None
    """What outlives the worker, where workers are started again."""
    streams: dict[int, Stream] = field(default_factory=_own_streams)
    """Where the caller writes, for standard output and standard error."""


@dataclass(frozen=True)
class Settings:
    """What of the caller's process has to be the same in its workers."""

    environ: dict[str, str]
    default_dtype: torch.dtype
    matmul_precision: str
    is_deterministic: bool
    warns_only: bool
    warning_filters: list[Any]
    start_method: str | None
    """Of multiprocessing, for the workers of a DataLoader; None where nobody has chosen."""
    sharing_strategy: str
    python_random: Any
    numpy_random: Any
    torch_random: torch.Tensor

    @classmethod
    def of_this_process(cls) -> Self:
        """Return those of the caller."""
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
        variables |= {name: value for name, value in self.environ.items() if not _OF_A_WORKER.fullmatch(name)}
        # What is here and not in the caller comes from the time when the fork server was started.
        for name in set(os.environ) - set(variables):
            if not _OF_A_WORKER.fullmatch(name):
                del os.environ[name]
        os.environ.update(variables)
        torch.set_default_dtype(self.default_dtype)
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.use_deterministic_algorithms(self.is_deterministic, warn_only=self.warns_only)
        torch.set_num_threads(threads_of_each(int(os.environ["LOCAL_WORLD_SIZE"])))
        warnings.resetwarnings()  # it also tells the module that its filters have changed
        warnings.filters.extend(self.warning_filters)  # type: ignore[attr-defined]
        # that of this process is the fork server's, whose children know no class of the user's program; those of a
        # fork do, where nobody has chosen
        is_linux = sys.platform == "linux"
        multiprocessing.set_start_method(self.start_method or ("fork" if is_linux else None), force=True)
        torch.multiprocessing.set_sharing_strategy(self.sharing_strategy)
        random.setstate(self.python_random)
        if self.numpy_random is not None:
            sys.modules["numpy"].random.set_state(self.numpy_random)
        torch.set_rng_state(self.torch_random)


def run(job: Job) -> None:
    """Run the function of `job` in this process, and leave its result or its failure in the folder."""
    _end_with_the_caller()
    # A terminal's Ctrl-C reaches every process of the group; what it means for the workers is the caller's to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number, stream in job.streams.items():
        os.dup2(stream.number, number)
        if stream.number > 2:
            os.close(stream.number)
    rank = os.environ["RANK"]
    try:
        stacks = (job.folder / f"{rank}.stacks").open("w") if job.shows_stacks else None
        if stacks is not None:
            faulthandler.register(SHOW_STACKS, stacks)
        unpack((job.folder / "settings").read_bytes()).apply(is_local=job.is_local)
        if job.node_folder is not None:
            os.environ[NODE_FOLDER] = str(job.node_folder)
        result = unpack((job.folder / "function").read_bytes())()
        is_kept = job.keeps_all_results or os.environ["LOCAL_RANK"] == "0"
        _write(job.folder / f"{rank}.result", pack(result if is_kept else None, "result"))
    except BaseException as error:  # noqa: BLE001 - a sys.exit() of the function would else pass for success
        _write(job.folder / f"{rank}.failure", pack(Failure.of(error)))
        _leave_at_once()
    # Returning would make elastic wait until all have returned; an exit without a code it lets pass.
    sys.exit()


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".part")
    temporary.write_bytes(data)
    temporary.rename(path)


def _leave_at_once() -> None:
    """End without unwinding: threads and process groups of a failed function may wait for peers for ever."""
    for child in multiprocessing.active_children():
        child.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _end_with_the_caller() -> None:
    """Have the kernel kill this process as soon as the caller is gone, even by SIGKILL."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    _prctl_pr_set_pdeathsig(signal.SIGKILL)  # the fork server may be killed alone
    if hasattr(fcntl, "F_SETSIG"):  # Linux
        # While a child lives, so does the fork server, its parent, also without the caller. But this is a pipe whose
        # other end the caller, and nobody else, holds open.
        pipe = parent.sentinel
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if not parent.is_alive():
        os._exit(1)


def threads_of_each(num_processes: int) -> int:
    """Return how many threads a process gets where so many share the cores that this one may use."""
    if (said := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        return max(1, int(said))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // num_processes)
