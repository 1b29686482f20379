"""Checks of one machine: torch, limits of processes, shared memory, temporary files, threads and timeouts."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from ..cluster.environment import ENVIRON, num_cores
from ..devices.backends import has_backend
from ..devices.cuda import CUDA
from ..devices.kinds import is_available
from .finding import Finding

_FEWEST_FILES: Final = 256
_FEW_FILES: Final = 1024
_SMALLEST_FILE: Final = 1 << 30
_SHORTEST_RUN: Final = 24 * 3600
"""Seconds."""
_LEAST_SHARED: Final = 64 << 20
_LITTLE_SHARED: Final = 512 << 20
_LONGEST_SOCKET: Final = 107
"""The most bytes that the path of a Unix socket may have."""
_OWN_PART: Final = len("/pymp-xxxxxxxx/listener-xxxxxxxx")
"""The length of what multiprocessing appends to the folder for temporary files."""
_SHARED: Final = Path("/dev/shm")


@dataclass(frozen=True)
class NestedTimeouts:
    """How long parts of a run wait, in seconds; they must nest."""

    start: float = 300.0
    """For the other processes, at start-up."""
    collective: float = 1800.0
    """For a collective."""
    hang: float | None = None
    """For a step, if hangs are detected."""


def check_torch() -> Iterator[Finding]:
    """Check that torch has what a run with several processes needs."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        yield Finding(
            "torch",
            f"torch {torch.__version__} is built without torch.distributed or gloo",
            "pip install --force-reinstall torch",
        )
    has_devices = any(Path("/dev").glob("nvidia[0-9]*"))
    if not has_devices or ENVIRON.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return
    if not is_available(CUDA):
        build = torch.version.cuda
        reason = f"is built for CUDA {build} but finds no device" if build else "is built for CPUs only"
        remedy = (
            "update the driver; nvidia-smi shows its version" if build else "install a build of torch for CUDA with pip"
        )
        yield Finding("torch", f"this machine has NVIDIA devices, but torch {torch.__version__} {reason}", remedy)
    elif not has_backend(CUDA):
        yield Finding("torch", f"torch {torch.__version__} has CUDA but no NCCL", "install torch from its own wheels")


def check_limits(has_infiniband: bool | None = None) -> Iterator[Finding]:
    """Check the resource limits of this process, which the processes it starts inherit."""
    if sys.platform == "win32":
        return
    import resource

    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < _FEW_FILES:
        could = "" if most == resource.RLIM_INFINITY or most >= _FEW_FILES else ", as root or in limits.conf"
        yield Finding(
            "file descriptors",
            f"a process may open only {files} files; data loader workers, checkpoints and connections need more",
            f"ulimit -n {max(4 * _FEW_FILES, 4096)}{could}",
            stops=files < _FEWEST_FILES,
        )
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if 0 <= size < _SMALLEST_FILE:
        yield Finding(
            "file size",
            f"a file may not be larger than {_format_bytes(size)}; checkpoints are larger",
            "ulimit -f unlimited",
        )
    seconds, _ = resource.getrlimit(resource.RLIMIT_CPU)
    if 0 <= seconds < _SHORTEST_RUN:
        yield Finding(
            "processor time",
            f"a process is killed after {seconds} s of processor time, as on the login nodes of clusters",
            "ulimit -t unlimited, or run in a job",
        )
    memory, _ = resource.getrlimit(resource.RLIMIT_AS)
    if 0 <= memory < 8 << 30:
        yield Finding(
            "address space",
            f"a process may map only {_format_bytes(memory)} of memory; torch alone maps several GB",
            "ulimit -v unlimited",
            stops=False,
        )
    if has_infiniband is None:
        has_infiniband = any(Path("/sys/class/infiniband").glob("*"))
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if has_infiniband and 0 <= locked < _SMALLEST_FILE:
        yield Finding(
            "locked memory",
            f"a process may lock only {_format_bytes(locked)} of memory, but this machine has InfiniBand, which locks "
            "what it sends",
            "ulimit -l unlimited, as root or in limits.conf",
        )


def check_shared_memory(path: Path = _SHARED) -> Iterator[Finding]:
    """Check the shared memory, which data loader workers and snapshots use."""
    if not path.is_dir():
        if sys.platform == "linux":
            yield Finding("shared memory", f"{path} does not exist", f"mount -t tmpfs tmpfs {path}")
        return
    usage = shutil.disk_usage(path)
    if not os.access(path, os.W_OK):
        yield Finding("shared memory", f"{path} cannot be written", f"chmod 1777 {path}")
    elif usage.free < _LITTLE_SHARED:
        yield Finding(
            "shared memory",
            f"{path} has {_format_bytes(usage.free)} left of {_format_bytes(usage.total)}; "
            "data loader workers pass batches there",
            f"mount -o remount,size=8G {path}, docker run --shm-size=8g, or delete files there",
            stops=usage.free < _LEAST_SHARED,
        )


def check_temporary(environ: Mapping[str, str] = ENVIRON) -> Iterator[Finding]:
    """Check the folder for temporary files, where processes that start each other keep their sockets."""
    try:
        folder = tempfile.gettempdir()
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"echelon")
            file.flush()
    except OSError as error:
        given = environ.get("TMPDIR", "/tmp")
        yield Finding("temporary files", f"{given} cannot be written ({error.strerror})", "export TMPDIR=/tmp")
        return
    length = len(os.fsencode(folder)) + _OWN_PART
    if length > _LONGEST_SOCKET:
        yield Finding(
            "temporary files",
            f"TMPDIR has {len(os.fsencode(folder))} bytes; the path of a socket in it would have {length}, but at most "
            f"{_LONGEST_SOCKET} are possible",
            "export TMPDIR=/tmp",
        )


def check_threads(num_processes: int, environ: Mapping[str, str] = ENVIRON) -> Iterator[Finding]:
    """Check that there are enough cores for the threads of all processes of this node."""
    cores = num_cores()
    text = environ.get("OMP_NUM_THREADS", "")
    text = text.partition(",")[0].strip()  # of a list the first counts, and the others for what is nested
    if text and not (text.isascii() and text.isdigit() and int(text) > 0):
        yield Finding("threads", f"OMP_NUM_THREADS={text!r} is not a number", "unset OMP_NUM_THREADS", stops=False)
    elif text and int(text) * num_processes > 2 * cores:
        yield Finding(
            "threads",
            f"OMP_NUM_THREADS={text} in {num_processes} process(es), but only {cores} core(s): threads take turns",
            f"export OMP_NUM_THREADS={max(1, cores // num_processes)}, or unset it"
            if int(text) > 1
            else f"start fewer processes, such as --nproc {cores}",
            stops=False,
        )


def check_timeouts(timeouts: NestedTimeouts) -> Iterator[Finding]:
    """Check that timeouts nest, so that the one that expires first is the one that should end a run."""
    if timeouts.start > timeouts.collective:
        yield Finding(
            "timeouts",
            f"processes wait {timeouts.start:g} s for each other at the start, but only {timeouts.collective:g} s in a "
            "collective, which then fails first",
            f"give a timeout above {timeouts.start:g} s, or a start_timeout below {timeouts.collective:g} s",
        )
    if timeouts.hang is not None and timeouts.hang >= timeouts.collective:
        yield Finding(
            "timeouts",
            f"a step counts as hanging after {timeouts.hang:g} s, but its collectives fail after "
            f"{timeouts.collective:g} s, before the stacks are read",
            f"give a hang_timeout below {timeouts.collective:g} s, or a longer timeout of the strategy",
        )


def _format_bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
