"""What the kernel tells of another process of this user; elsewhere than on Linux only whether it is there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Literal, NamedTuple

_LEAST: Final = 0.1  # seconds of a processor
_SHARE: Final = 0.01  # of one processor; the threads of an idle worker that wake up now and then take less


class Process(NamedTuple):
    """The state of a process, and the processor time that it has used, in seconds."""

    state: Literal["runs", "stopped", "ended", "unknown"]
    """Stopped is one that a signal has stopped, not a debugger."""
    used: float = 0.0


def look_at(pid: int) -> Process:
    """Return what a process does."""
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return Process("ended")
        return Process("unknown")
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return Process("ended")
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may hold anything
    used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return Process({"T": "stopped", "Z": "ended", "X": "ended"}.get(fields[0], "runs"), used)  # type: ignore[arg-type]


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


class Activity:
    """Since when a process has been as good as idle, told from the processor time that it uses."""

    def __init__(self, now: float, used: float) -> None:
        self.newest = now
        """When it was last seen to do something."""
        self._used = used

    def note(self, now: float, used: float) -> None:
        """Take in how much it has used by now."""
        if used - self._used >= max(_LEAST, _SHARE * (now - self.newest)):
            self.newest, self._used = now, used
