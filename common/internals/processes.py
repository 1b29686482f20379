"""Private names of Python's multiprocessing: its fork server, and what it keeps of processes (CPython 3.11 to 3.13)."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing import forkserver
from typing import Any, Final

_server: Final[Any] = forkserver._forkserver  # noqa: SLF001
"""The one fork server of a process, running or not."""


def list_preloaded() -> list[str]:
    """Return the modules that the fork server is to import (`_preload_modules`)."""
    return list(_server._preload_modules)  # noqa: SLF001


def find_fork_server() -> int | None:
    """Return the process id of the fork server; None while it was not started (`_forkserver_pid`)."""
    pid: int | None = _server._forkserver_pid  # noqa: SLF001
    return pid


def stop_fork_server() -> None:
    """End the fork server; the next process that is started starts it again (`_stop`)."""
    _server._stop()  # noqa: SLF001


def forget_fork_server() -> None:
    """Let a forked process have a fork server of its own, not that of its parent (`_lock`, `_forkserver_pid`)."""
    _server._lock = threading.Lock()  # another thread of the parent may have held it  # noqa: SLF001
    if _server._forkserver_pid is not None:  # noqa: SLF001
        os.close(_server._forkserver_alive_fd)  # noqa: SLF001
        _server._forkserver_address = _server._forkserver_alive_fd = _server._forkserver_pid = None  # noqa: SLF001


def find_process_settings() -> dict[str, Any]:
    """Return what this process hands on to those that it starts, to be changed, such as ``tempdir`` (`_config`)."""
    settings: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # noqa: SLF001
    return settings


def set_exit_code(process: Any, code: int) -> None:
    """Set what a process has exited with, where nobody reports it any more, so that nobody waits (`_popen`)."""
    process._popen.returncode = code  # noqa: SLF001
