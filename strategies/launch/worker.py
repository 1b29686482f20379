"""Worker process: it takes over its caller's settings, runs the function, and leaves the result in a file."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import mmap
import multiprocessing
import os
import random
import re
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import reduction
from pathlib import Path
from typing import Any, Final, Self

import torch

from ...common.errors import ProcessError
from ...common.proc_status import look_at
from ..cluster.environment import CALLS_FILE, NODE_FOLDER, launch_of, num_cores, overriding_variables
from ..cluster.network import loopback_variables
from ..cluster.torchrun import RUN_ID, has_agent
from ..devices.kinds import are_unusable
from ..distributed.pickling import pack_into, unpack_from, unpack_value
from ..torch_internals.distributed import kill_with_parent
from .failures import Failure
from .signal_handlers import RUN_SIGNALS, ignore_signal
from .torch_settings import TorchSettings

SHOW_STACKS: Final = getattr(signal, "SIGUSR2", signal.SIGTERM)  # Windows, where no workers start, has none
"""Makes a worker with `WorkerTask.shows_stacks` write the stack of each of its threads."""

NOT_FOR_THE_FORK_SERVER: Final = frozenset(RUN_SIGNALS)
"""Signals that a terminal or a scheduler may send to the whole process group of a run."""

_PRELOAD: Final = "ECHELON_PRELOAD"
"""Variable that tells the fork server whether its children need devices, and which modules to import."""

IMPORTED_FIRST: Final[list[str]] = []
"""Modules that workers import before any of the user's, because they change what imports find."""

CULPRITS: Final[list[str]] = []
"""In the fork server and its children, if devices are needed: the module after whose import no child could use it."""

# Variables that torch.distributed.elastic sets for each worker; a caller that is itself a worker has them, too.
_WORKER_VARIABLES: Final = re.compile(
    "((GROUP|ROLE|LOCAL)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
    f"|TORCH_NCCL_ASYNC_ERROR_HANDLING|{NODE_FOLDER}|{CALLS_FILE}"
)


class InheritedFile:
    """A file descriptor of the caller, duplicated for each worker; the fork server's own may be out of date."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[object, ...]:
        return _from_duplicate, (reduction.DupFd(self.number),)

    def unpack(self) -> Any:
        """Return the object that was pickled to this file, and close it."""
        try:  # mapped, because the workers share the file position
            with mmap.mmap(self.number, 0, access=mmap.ACCESS_READ) as data:
                return unpack_from(data)
        finally:
            os.close(self.number)


def _from_duplicate(duplicate: Any) -> InheritedFile:
    return InheritedFile(duplicate.detach())


def _own_streams() -> dict[int, InheritedFile]:
    streams = {}
    for number in (1, 2):
        with contextlib.suppress(OSError):  # closed, as in a daemon
            os.fstat(number)
            streams[number] = InheritedFile(number)
    return streams


@dataclass(frozen=True)
class WorkerTask:
    """Task of the workers of a run."""

    folder: Path
    """The folder in which workers leave results and failures."""
    function: InheritedFile
    """The function to run, pickled."""
    caller: bytes
    """The `CallerState`, pickled."""
    is_local: bool
    """Whether all processes are on this machine."""
    keeps_all_results: bool
    """Whether to keep every worker's result, and not only that of the node's first worker."""
    shows_stacks: bool = False
    modules: tuple[str, ...] = ()
    """Modules of installed packages that the function imports."""
    uses_devices: bool = False
    node_folder: Path | None = None
    """Folder that outlives the workers, if they are restarted after a failure."""
    streams: dict[int, InheritedFile] = field(default_factory=_own_streams)
    """Standard output and standard error of the caller."""

    def calls_file(self, rank: int) -> Path:
        """Return the file in which a worker records its collectives."""
        return self.folder / f"{rank}.calls"


@dataclass(frozen=True)
class CallerState:
    """State of the caller's process that its workers take over."""

    environ: dict[str, str]
    umask: int | None
    """None if it cannot be read without changing it for a moment, during which other threads might create files."""
    torch_settings: TorchSettings
    warning_filters: list[object]
    start_method: str | None
    """Start method of multiprocessing, for DataLoader workers; None if the caller has not chosen one."""
    sharing_strategy: str
    seed: int
    """torch's seed, for the generators of devices, which are not in use yet, so that only their seed matters."""
    imported_first: tuple[str, ...]
    python_random: Any
    numpy_random: object
    torch_random: torch.Tensor

    @classmethod
    def of_this_process(cls) -> Self:
        """Return the state of the caller."""
        return cls(
            environ=dict(os.environ),
            umask=_read_umask(),
            torch_settings=TorchSettings.of_this_process(),
            warning_filters=list(warnings.filters),
            start_method=multiprocessing.get_start_method(allow_none=True),
            sharing_strategy=torch.multiprocessing.get_sharing_strategy(),
            seed=torch.initial_seed(),
            imported_first=tuple(IMPORTED_FIRST),
            python_random=random.getstate(),
            numpy_random=sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None,
            torch_random=torch.get_rng_state(),
        )

    def apply(self, *, is_local: bool) -> None:
        """Make this process like the caller's."""
        variables = loopback_variables() if is_local else {}
        variables |= {name: value for name, value in self.environ.items() if not _WORKER_VARIABLES.fullmatch(name)}
        # Variables that the caller does not have date from the start of the fork server.
        for name in set(os.environ) - set(variables):
            if not _WORKER_VARIABLES.fullmatch(name):
                del os.environ[name]
        os.environ.update(variables)
        if self.umask is not None:
            os.umask(self.umask)
        self.torch_settings.apply()
        torch.set_num_threads(threads_per_process(int(os.environ["LOCAL_WORLD_SIZE"])))
        for name in self.imported_first:
            importlib.import_module(name)
        warnings.resetwarnings()  # it also clears the module's cache of filters
        warnings.filters.extend(self.warning_filters)  # type: ignore[attr-defined]
        # Python >= 3.12 warns about the start method chosen below, each time a loader starts its workers
        warnings.filterwarnings("ignore", r".*is multi-threaded, use of fork", DeprecationWarning)
        # This process has the fork server's start method, whose children cannot import classes of the user's program.
        # Forked children have them already, so fork is the default.
        is_linux = sys.platform == "linux"
        multiprocessing.set_start_method(self.start_method or ("fork" if is_linux else None), force=True)
        torch.multiprocessing.set_sharing_strategy(self.sharing_strategy)
        torch.manual_seed(self.seed)
        random.setstate(self.python_random)
        if self.numpy_random is not None:
            sys.modules["numpy"].random.set_state(self.numpy_random)
        torch.set_rng_state(self.torch_random)


def _read_umask() -> int | None:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)
    return None


@contextlib.contextmanager
def setting_preload_words(words: Iterable[str]) -> Iterator[None]:
    """Set the variables for starting the fork server inside the block, then restore them."""
    # is_available() then asks NVML if possible, which leaves CUDA usable after a fork
    variables = {_PRELOAD: ",".join(words), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    with overriding_variables(variables):
        yield


def take_preload() -> str:
    """Return, in the fork server, the words that were given to `setting_preload_words`."""
    return os.environ.pop(_PRELOAD, "")


def run_worker(task: WorkerTask) -> None:
    """Run the task's function in this process, and leave its result or its failure in the folder."""
    end_with_the_caller()
    # A terminal's Ctrl-C reaches every process of the group; the caller decides what it means for the workers.
    ignore_signal(signal.SIGINT)
    for number, stream in task.streams.items():
        os.dup2(stream.number, number)
        if stream.number > 2:
            os.close(stream.number)
    rank = os.environ["RANK"]
    try:
        if task.uses_devices:
            _check_devices()
        stacks = (task.folder / f"{rank}.stacks").open("w") if task.shows_stacks else None
        if stacks is not None:
            faulthandler.register(SHOW_STACKS, stacks)
        unpack_value(task.caller).apply(is_local=task.is_local)
        os.environ[CALLS_FILE] = str(task.calls_file(int(rank)))
        if task.node_folder is not None:
            os.environ[NODE_FOLDER] = str(task.node_folder)
        result = task.function.unpack()()
        is_kept = task.keeps_all_results or os.environ["LOCAL_RANK"] == "0"
        _write_packed(task.folder / f"{rank}.result", result if is_kept else None, "result")
    except BaseException as error:  # noqa: BLE001 - a sys.exit() in the function would look like success
        _write_packed(task.folder / f"{rank}.failure", Failure.of(error), "failure")
        _leave_at_once()
    # Returning would make elastic wait until all workers have returned; an exit without a code does not.
    # Not sys.exit(), which wandb replaces with one that passes code 0.
    raise SystemExit


def makes_devices_unusable() -> bool:
    """Return whether a fork of this process could not use devices, since it has asked for one; only a fork can tell."""
    pid = os.fork()
    if pid == 0:
        os._exit(int(are_unusable()))
    return os.waitpid(pid, 0)[1] != 0


def _check_devices() -> None:
    """Raise a `ProcessError` if this process cannot use a device, because its fork server initialized it."""
    if are_unusable():
        name = CULPRITS[0] if CULPRITS else "a module that the program named in set_forkserver_preload"
        raise ProcessError(
            f"This worker cannot use CUDA or another device: {name} asked for devices when the fork server imported "
            "it; do not call torch.cuda.is_available() or the like while a module is imported, or leave that module "
            "out of set_forkserver_preload."
        )


def _write_packed(path: Path, value: object, name: str) -> None:
    temporary = path.with_suffix(".part")
    with temporary.open("wb") as file:
        pack_into(file, value, name)
    temporary.rename(path)


def _leave_at_once() -> None:
    """Exit without unwinding: threads and process groups of a failed function may wait for peers forever."""
    for child in multiprocessing.active_children():
        child.terminate()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # None if the caller's was closed
            stream.flush()
    os._exit(1)


def end_with_the_caller() -> None:
    """Make the kernel kill this process as soon as the caller is gone, even after a SIGKILL."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    kill_with_parent(signal.SIGKILL)  # the fork server may be killed alone
    if sys.platform == "linux":
        import fcntl  # not on Windows

        # The fork server, which is this process's parent, outlives the caller as long as it has children. But only the
        # caller holds the other end of this pipe open.
        pipe = parent.sentinel
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if not parent.is_alive():
        os._exit(1)


def end_with_the_agent() -> None:
    """Make the kernel kill this process as soon as the agent that started it, a launch's or torchrun's, is gone.

    The processes of a launch that was killed would go on, and keep its folder from the one that is started next.

    Raises:
        ProcessError: if the launch is gone already.
    """
    parent = os.getppid()
    if _is_agent(parent):
        kill_with_parent(signal.SIGKILL)
    launch = launch_of()
    if launch is not None and look_at(launch).state == "ended":
        raise ProcessError(
            f"Process {launch}, the `echelon launch` that started this one, has ended; start the program again, or "
            "unset ECHELON_LAUNCH if it is to run by itself."
        )


def _is_agent(pid: int) -> bool:
    """Return whether a process, the parent of this one, has started it as one of a run's, and is none of them itself.

    Of those it is none: a program may start others, which inherit its variables, and may outlive it.
    """
    if launch_of() == pid:
        return True
    if not has_agent():
        return False
    try:
        return f"{RUN_ID}=".encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # another user's, or no Linux
        return False


def threads_per_process(num_processes: int) -> int:
    """Return the number of threads for each of `num_processes` that share the cores available to this process."""
    if (setting := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        return max(1, int(setting))
    return max(1, num_cores() // num_processes)
