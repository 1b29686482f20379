"""What the kernel tells of another process of this user; on Linux only, elsewhere nothing is known."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

State = Literal["runs", "stopped", "ended", "unknown"]


def state_of(pid: int) -> State:
    """Return whether a process runs, is stopped by a signal (not by a debugger), or has ended."""
    if not Path("/proc/self/stat").exists():
        return "unknown"
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "ended"
    letter = text[text.rindex(")") + 2]  # the name before it may hold anything
    return "stopped" if letter == "T" else "ended" if letter in "ZXx" else "runs"


def is_traced(pid: int) -> bool:
    """Return whether a debugger is attached to a process."""
    return status_of(pid).get("TracerPid", "0") != "0"


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    return bool(int(status_of(pid).get("SigCgt", "0"), 16) >> (number - 1) & 1)


def status_of(pid: int) -> dict[str, str]:
    """Return the lines of /proc/PID/status by their names; nothing of a process that is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
