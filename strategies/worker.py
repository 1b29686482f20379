"""One worker process: it becomes like its caller, runs the function, and leaves what came out in a file."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import random
import re
import signal
import socket
import sys
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch

from .travel import pack, unpack

# What torch.distributed.elastic tells each worker; a caller that is a worker itself has variables of the same names.
_OF_A_WORKER: Final = re.compile(
    "(GROUP_|ROLE_|LOCAL_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|TORCH_NCCL_ASYNC_ERROR_HANDLING"
)
_INTERFACES: Final = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# How the loss of a peer, which is no cause but a consequence, is told by those that still live.
_OF_A_PEER: Final = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe", re.IGNORECASE)


@dataclass(frozen=True)
class Job:
    """What a worker is told at its start; the function itself lies in the folder."""

    folder: Path
    keeps_all_results: bool


@dataclass(frozen=True)
class Settings:
    """What of the caller's process has to be the same in its workers."""

    environ: dict[str, str]
    is_local: bool
    default_dtype: torch.dtype
    matmul_precision: str
    is_deterministic: bool
    warns_only: bool
    warning_filters: list[Any]
    python_random: Any
    torch_random: torch.Tensor

    @classmethod
    def of_this_process(cls, *, is_local: bool) -> Self:
        """Return those of the caller; `is_local` when all processes are on this machine."""
        return cls(
            environ=dict(os.environ),
            is_local=is_local,
            default_dtype=torch.get_default_dtype(),
            matmul_precision=torch.get_float32_matmul_precision(),
            is_deterministic=torch.are_deterministic_algorithms_enabled(),
            warns_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            warning_filters=list(warnings.filters),
            python_random=random.getstate(),
            torch_random=torch.get_rng_state(),
        )

    def apply(self) -> None:
        """Make this process like the caller's."""
        own = {name: value for name, value in os.environ.items() if _OF_A_WORKER.fullmatch(name)}
        kept = {name: value for name, value in self.environ.items() if not _OF_A_WORKER.fullmatch(name)}
        if self.is_local:
            kept = {**dict.fromkeys(_INTERFACES, _loopback()), **kept}
        # The variables here are those that the fork server was started with, perhaps long ago.
        for name in set(os.environ) - set(own) - set(kept):
            del os.environ[name]
        os.environ.update(kept)
        torch.set_default_dtype(self.default_dtype)
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.use_deterministic_algorithms(self.is_deterministic, warn_only=self.warns_only)
        torch.set_num_threads(_threads())
        warnings.filters[:] = self.warning_filters  # type: ignore[index]
        random.setstate(self.python_random)
        torch.set_rng_state(self.torch_random)


@dataclass(frozen=True)
class Failure:
    """How the function failed in one worker."""

    error: bytes | None
    """The exception, packed; None if it cannot be."""
    text: str
    traceback: str
    blames_a_peer: bool
    is_exit: bool


def run(job: Job) -> None:
    """Run the function of `job` in this process, and leave its result or its failure in the folder."""
    _end_with_the_caller()
    # A terminal's Ctrl-C reaches every process of the group; what it means for the workers is the caller's to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank = os.environ["RANK"]
    try:
        unpack((job.folder / "settings").read_bytes()).apply()
        result = unpack((job.folder / "function").read_bytes())()
        is_kept = job.keeps_all_results or os.environ["LOCAL_RANK"] == "0"
        _write(job.folder / f"{rank}.result", pack(result if is_kept else None, "the function's result"))
    except BaseException as error:  # noqa: BLE001 - a sys.exit() of the function would else pass for success
        _write(job.folder / f"{rank}.failure", pack(_failure(error)))
        _leave_at_once()
    # Returning would make elastic ask for a value and wait until all have returned; without a code it lets pass.
    sys.exit()


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".part")
    temporary.write_bytes(data)
    temporary.rename(path)


def _failure(error: BaseException) -> Failure:
    chain, link = [error], error.__cause__
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__
    try:
        packed = pack(error)
        unpack(packed)
    except Exception:  # noqa: BLE001 - whatever the exception's own class raises
        packed = None
    return Failure(
        packed,
        "".join(traceback.format_exception_only(error)).strip(),
        "".join(traceback.format_exception(error)),
        any(_blames_a_peer(link) for link in chain),
        isinstance(error, SystemExit | KeyboardInterrupt),
    )


def _blames_a_peer(error: BaseException) -> bool:
    is_of_torch = isinstance(error, torch.distributed.DistError | ConnectionError)
    return is_of_torch or (isinstance(error, RuntimeError) and bool(_OF_A_PEER.search(str(error))))


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
    if hasattr(fcntl, "F_SETSIG"):
        # The parent is the fork server, and lives as long as its children; so PR_SET_PDEATHSIG does not do. But the
        # caller, and nobody else, holds the other end of this pipe.
        pipe = parent.sentinel
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if not parent.is_alive():
        os._exit(1)


def _loopback() -> str:
    names = {name for _, name in socket.if_nameindex()}
    return "lo0" if "lo0" in names else "lo"  # macOS and Linux


def _threads() -> int:
    if (said := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        return max(1, int(said))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ["LOCAL_WORLD_SIZE"]))
