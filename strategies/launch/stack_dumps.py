"""Stack dumps: the stacks of hanging workers' threads and of what they wait for, or their state in the kernel."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ...common.proc_status import catches_signal, children_of, look_at, status_of
from .worker import SHOW_STACKS

_PATIENCE: Final = 2.0
_POLL: Final = 0.05
_MOST: Final = 4
"""Processes of each worker that are asked."""
_TOLD: Final = ("State", "TracerPid", "Threads", "VmRSS", "SigPnd", "ShdPnd", "SigBlk")


def dump_stacks(pids: Mapping[int, int], folder: Path) -> dict[int, str]:
    """Return the stacks of each worker's threads, by rank, within two seconds, and those of processes that it forked.

    Workers write them to ``RANK.stacks`` in `folder`, the job's, with a signal handler in C that works even if Python
    is stuck. What a worker forks, such as the processes of a DataLoader, inherits both; a few of them are asked after
    it, one of each worker at a time. For a process that cannot answer, the text says why, and gives its state in the
    kernel.
    """
    files = {rank: folder / f"{rank}.stacks" for rank in pids}
    texts = _ask_all({rank: (pid, files[rank]) for rank, pid in pids.items()})
    forked = {rank: _forks_of(pid) for rank, pid in pids.items()}
    for number in range(_MOST):
        asked = {rank: (those[number], files[rank]) for rank, those in forked.items() if number < len(those)}
        names = {rank: status_of(pid).get("Name", "ended") for rank, (pid, _) in asked.items()}
        for rank, text in _ask_all(asked).items():
            texts[rank] += f"\nProcess {asked[rank][0]} ({names[rank]}), which rank {rank} has started:\n{text}"
    return texts


def _forks_of(pid: int) -> list[int]:
    """Return the processes that a worker has forked; other programs, which it has started, get no signal."""
    command = _command_of(pid)
    return [each for each in children_of(pid) if catches_signal(each, SHOW_STACKS) and _command_of(each) == command]


def _command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it is gone
        return b""


def _ask_all(asked: Mapping[int, tuple[int, Path]]) -> dict[int, str]:
    """Return what processes, one of each rank, add to their files, or why one cannot."""
    before = {rank: _size_of_file(file) for rank, (_, file) in asked.items()}
    reasons = {rank: _ask_for_stacks(pid) for rank, (pid, _) in asked.items()}
    sizes = _wait_for_dumps({rank: file for rank, (_, file) in asked.items() if reasons[rank] is None}, before)
    texts = {}
    for rank, (pid, file) in asked.items():
        if sizes.get(rank, 0) > before[rank]:
            texts[rank] = file.read_bytes()[before[rank] :].decode(errors="replace")
        else:
            reason = reasons[rank] or f"It did not answer within {_PATIENCE:g} s."
            texts[rank] = f"{reason}\n{_kernel_state(pid)}"
    return texts


def _wait_for_dumps(files: Mapping[int, Path], before: Mapping[int, int]) -> dict[int, int]:
    """Return the sizes of files once all have grown and stopped growing, or after two seconds."""
    end = time.monotonic() + _PATIENCE
    sizes: dict[int, int] = {}
    while files and time.monotonic() < end:
        time.sleep(_POLL)
        last, sizes = sizes, {rank: _size_of_file(file) for rank, file in files.items()}
        if sizes == last and all(size > before[rank] for rank, size in sizes.items()):
            break
    return sizes


def _ask_for_stacks(pid: int) -> str | None:
    """Send the signal, or return why the process cannot answer."""
    state = look_at(pid).state
    if state == "stopped":
        return "It is stopped and cannot answer; `kill -CONT` resumes it."
    if state == "ended":
        return "It has ended."
    if state == "runs" and not catches_signal(pid, SHOW_STACKS):
        return "It is still being started and cannot answer."
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, SHOW_STACKS)
    return None


def _size_of_file(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _kernel_state(pid: int) -> str:
    status = status_of(pid)
    lines = [f"{name}: {status[name]}" for name in _TOLD if name in status]
    for name in ("wchan", "stack"):
        with contextlib.suppress(OSError):  # only readable by root, or not available in this kernel
            text = Path(f"/proc/{pid}/{name}").read_text().strip()
            lines.append(f"{name}: {text}" if text else f"{name}: -")
    return "\n".join(lines)
