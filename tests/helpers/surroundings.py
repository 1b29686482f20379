"""Surroundings of a run in the caller's process, which must be unchanged afterwards, however the run ended."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_PATIENCE = 30.0  # seconds for threads and processes that were just told to end
_HELPERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
"""Processes that Python starts once and keeps."""
_PIPES_OF_HELPERS = 4
_OF_TORCH = ("TORCHINDUCTOR_CACHE_DIR",)
"""Variables that torch sets when it is fully imported, as by the first optimizer."""


def _handlers() -> dict[int, Any]:
    # from the first DataLoader with workers on, torch handles SIGCHLD permanently
    numbers = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}
    return {int(number): signal.getsignal(number) for number in numbers}


def _children() -> set[int]:
    """Return the processes that this one has started, except Python's helpers, including those that have ended."""
    children = set()
    for task in Path("/proc/self/task").iterdir():
        for pid in _text(task / "children").split():
            if not any(helper in _text(Path(f"/proc/{pid}/cmdline")) for helper in _HELPERS):
                children.add(int(pid))
    return children


def _text(file: Path) -> str:
    """Return the text of a file of a thread or a process, nothing if that has ended since it was listed."""
    try:
        return file.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _descriptors() -> list[str]:
    """Return the open descriptors by kind, in which all pipes are equal."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}").split("[")[0])
        except OSError:  # the descriptor of the listing itself
            continue
    return sorted(link for link in links if not link.startswith("/proc/"))


def _temporary(private: Path | None) -> set[str]:
    if private is not None:
        return {path.name for path in private.iterdir() if not path.name.startswith(("pymp-", "torchinductor_"))}
    folders = (Path(tempfile.gettempdir()), Path("/dev/shm"))
    names = {path.name for folder in folders if folder.is_dir() for path in folder.iterdir()}
    return {name for name in names if name.startswith((f"echelon-node-{os.getpid()}", f".echelon-node-{os.getpid()}"))}


def _wakeup() -> int:
    """Return the descriptor to which signals are written; only the main thread can read it."""
    if threading.current_thread() is not threading.main_thread():
        return -1
    signal.set_wakeup_fd(number := signal.set_wakeup_fd(-1))
    return number


def _torch_settings() -> tuple[Any, ...]:
    return (
        *(torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), torch.get_num_threads()),
        *(torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()),
        *(torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, dist.is_initialized()),
    )


def _look(temporary: Path | None) -> dict[str, Any]:
    gc.collect()
    return {
        "handlers": _handlers(),
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "woken by signals": _wakeup(),
        "timer": signal.getitimer(signal.ITIMER_REAL)[1],
        "__main__": sys.modules["__main__"],
        "threads": {thread.name for thread in threading.enumerate()},
        "children": _children(),
        "helpers": forkserver._forkserver._forkserver_pid is not None,
        "descriptors": _descriptors(),
        "temporary files": _temporary(temporary),
        "folder": os.getcwd(),
        "variables": {name: value for name, value in os.environ.items() if name not in _OF_TORCH},
        "paths": list(sys.path),
        "settings of torch": _torch_settings(),
        # not sys.excepthook: after fit, it must show that Ctrl-C ended the run
        "streams": (threading.excepthook, sys.stdout, sys.stderr),
    }


@contextmanager
def unchanged(temporary: Path | None = None) -> Iterator[None]:
    """Check that a block leaves its surroundings unchanged; Python's helpers, which the first run starts, may stay.

    Args:
        temporary: the folder of temporary files, if only this process uses it; nothing new may be in it afterwards.
    """
    before = _look(temporary)
    modules = dict(sys.modules)
    yield
    end = time.monotonic() + _PATIENCE
    while (changes := _changes(before, _look(temporary))) and time.monotonic() < end:
        time.sleep(0.05)
    exchanged = {name for name, module in modules.items() if sys.modules.get(name) is not module}
    assert not changes and not exchanged, f"{changes}, modules {exchanged}"


def _changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    changes = {name: _difference(value, after[name]) for name, value in before.items() if after[name] != value}
    opened = list(after["descriptors"])
    for link in before["descriptors"]:
        if link in opened:
            opened.remove(link)
    if not before["helpers"] and opened.count("pipe:") == len(opened) <= _PIPES_OF_HELPERS:
        changes.pop("descriptors", None)
    changes.pop("helpers", None)
    return changes


def _difference(before: Any, after: Any) -> tuple[Any, Any]:
    if isinstance(before, dict):
        names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        return {name: before.get(name) for name in names}, {name: after.get(name) for name in names}
    return before, after
