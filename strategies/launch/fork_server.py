"""Multiprocessing's fork server, from which workers start with its modules already imported."""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.util import Finalize
from types import ModuleType
from typing import Final

from ...common.errors import ConfigError, ProcessError
from ...common.internals.processes import (
    find_fork_server,
    find_process_settings,
    forget_fork_server,
    list_preloaded,
    stop_fork_server,
)
from ...common.proc_status import look_at
from ..torch_internals.compiler import COMPILER_MODULE
from .worker import CULPRITS, NOT_FOR_THE_FORK_SERVER, setting_preload_words

PRELOADED = (
    "torch",
    COMPILER_MODULE,
    "torch.distributed.optim",
    "torch.distributed.tensor.debug",
    "cloudpickle",
    f"{__package__}.forkserver_preload",
)

_LONGEST_FOLDER: Final = 75
"""Bytes; multiprocessing adds 32, and the address of a socket has at most 107 on Linux."""
_ONE_THREAD: Final = threading.RLock()
"""Guards temporary changes to global state, which another thread could otherwise take for the original."""

_log = logging.getLogger(__name__)


def preload_modules(modules: Iterable[str], *, uses_devices: bool = False) -> None:
    """Start the fork server, unless it is running, and have it import the modules that each worker needs.

    With `uses_devices`, if a module initializes a device when it is imported, so that no worker could use it, the fork
    server is restarted without any of these modules.
    """
    # __main__, a default, is the user's program, which would run a second time
    users = [name for name in list_preloaded() if name not in (*PRELOADED, "__main__")]
    own = [name for name in dict.fromkeys(modules) if name not in (*PRELOADED, *users)]
    if not _start_fork_server(users, own, uses_devices=uses_devices) or not (uses_devices and own):
        return
    if number := _in_a_child(_number_of_culprit, own):
        _log.warning(
            "%s asks for devices when it is imported, after which no worker could use one; so the workers import "
            "their modules themselves, which takes longer. Call torch.cuda.is_available() only inside functions.",
            own[number - 1],
        )
        stop_fork_server()
        _start_fork_server((), (), uses_devices=uses_devices)


def _start_fork_server(users: Iterable[str], own: Iterable[str], *, uses_devices: bool) -> bool:
    """Start the fork server, and return whether it was not running yet."""
    pid = find_fork_server()
    _forget_in_forks()
    _keep_addresses_short()
    multiprocessing.set_forkserver_preload([*PRELOADED, *users])
    resource_tracker.ensure_running()  # otherwise the fork server would start it, which unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_THE_FORK_SERVER)  # inherited by the fork server
    try:
        with (
            keeping_start_method(),
            setting_preload_words(["devices" if uses_devices else "", *own]),
        ):  # one thread at a time
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    now = find_fork_server()
    if now is not None and look_at(now).state == "stopped":
        raise ProcessError(
            f"multiprocessing's fork server (process {now}), which starts the processes of a run, was stopped by a "
            f"signal; let it go on with `kill -CONT {now}`, and start the run again."
        )
    return now != pid


def _keep_addresses_short() -> None:
    """Keep multiprocessing's sockets out of a temporary folder whose path is too long for the address of a socket.

    Raises:
        ConfigError: if there is no other folder.
    """
    config = find_process_settings()
    folder = config.get("tempdir") or tempfile.gettempdir()
    if len(os.fsencode(folder)) <= _LONGEST_FOLDER:
        return
    for parent in ("/tmp", "/var/tmp", "/dev/shm"):
        with contextlib.suppress(OSError):
            config["tempdir"] = own = tempfile.mkdtemp(prefix="pymp-", dir=parent)
            Finalize(None, shutil.rmtree, args=(own,), kwargs={"ignore_errors": True}, exitpriority=-100)
            return
    raise ConfigError(
        f"The path of the temporary folder must have at most {_LONGEST_FOLDER} bytes for the sockets in it, got "
        f"{folder!r}; set TMPDIR to another folder."
    )


@functools.cache
def _forget_in_forks() -> None:
    """Make forked processes start their own fork server. Cached, since fork hooks cannot be unregistered.

    CPython (3.11 to 3.13) would check there whether the inherited one still runs, which only its parent may do:
    "ChildProcessError: No child processes".
    """
    os.register_at_fork(after_in_child=forget_fork_server)


def _in_a_child(function: Callable[[list[str]], None], names: list[str]) -> int:
    """Return the exit code of a function in a child of the fork server."""
    with blank_main(), keeping_start_method():
        process = multiprocessing.get_context("forkserver").Process(target=function, args=(names,))
        process.start()
    process.join()
    return process.exitcode or 0


def _number_of_culprit(names: list[str]) -> None:
    """Exit with the number of the module that made devices unusable, counted from 1, or with 0 if none did."""
    os._exit(names.index(CULPRITS[0]) + 1 if CULPRITS else 0)


@contextlib.contextmanager
def keeping_start_method() -> Iterator[None]:
    """Leave the program free to choose its start method.

    CPython reads the start method when it starts a fork server or a child of one, and then considers the default
    chosen: ``set_start_method`` would raise "context has already been set" from then on.
    """
    with _ONE_THREAD:
        is_open = multiprocessing.get_start_method(allow_none=True) is None
        try:
            yield
        finally:
            if is_open:
                multiprocessing.set_start_method(None, force=True)


@contextlib.contextmanager
def blank_main() -> Iterator[None]:
    """Hide the user's program from multiprocessing, which would make each child run it again as an import."""
    with _ONE_THREAD:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main
