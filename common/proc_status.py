"""Status of another process, as the kernel reports it; on systems other than Linux, only whether it exists."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import socket
import sys
from pathlib import Path
from typing import Final, Literal, NamedTuple

_MIN_TIME: Final = 0.1  # seconds of processor time
_MIN_LOAD: Final = 0.01  # of one processor; an idle worker, whose threads wake up now and then, uses less
_QUERY, _DENIED, _STILL_ACTIVE = 0x1000, 5, 259  # of Windows


class Process(NamedTuple):
    """State of a process, and the processor time that it has used, in seconds."""

    state: Literal["runs", "stopped", "ended", "unknown"]
    """"stopped" means stopped by a signal, not by a debugger."""
    used: float = 0.0


def look_at(pid: int) -> Process:
    """Return whether a process runs, and how much processor time it has used."""
    if not Path("/proc/self/stat").exists():
        return Process("unknown" if process_exists(pid) else "ended")
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return Process("ended")
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may contain any character
    used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return Process({"T": "stopped", "Z": "ended", "X": "ended"}.get(fields[0], "runs"), used)  # type: ignore[arg-type]


def process_exists(pid: int) -> bool:
    """Return whether there is a process with this number on this machine, whoever's it is."""
    if sys.platform == "win32":  # where os.kill(pid, 0) would send Ctrl-C
        kernel = ctypes.WinDLL("kernel32", use_last_error=True)
        handle = kernel.OpenProcess(_QUERY, False, pid)
        if not handle:
            return ctypes.get_last_error() == _DENIED
        code = ctypes.c_ulong()
        kernel.GetExitCodeProcess(handle, ctypes.byref(code))
        kernel.CloseHandle(handle)
        return code.value == _STILL_ACTIVE
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def is_traced(pid: int) -> bool:
    """Return whether a debugger is attached to a process."""
    return status_of(pid).get("TracerPid", "0") != "0"


def catches_signal(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    return bool(int(status_of(pid).get("SigCgt", "0"), 16) >> (number - 1) & 1)


def status_of(pid: int) -> dict[str, str]:
    """Return the fields of /proc/PID/status by name; an empty dictionary for a process that is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started and not yet waited for; none on systems other than Linux."""
    pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [child for child in pids if status_of(child).get("PPid") == str(pid)]


def leads_session(pid: int) -> bool:
    """Return whether a process was started with a session of its own."""
    try:
        return os.getsid(pid) == pid
    except OSError:
        return False


def started_at(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 for one that is gone, or not on Linux."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text[text.rindex(")") + 2 :].split()[19])


@functools.cache
def host_id() -> str:
    """Return a name for this boot of this machine and container, within which process ids are unique."""
    identity = socket.gethostname()
    for source in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            identity += os.readlink(source) if os.path.islink(source) else Path(source).read_text()
        except OSError:  # not Linux
            continue
    name = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:24]
    return f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"


class Activity:
    """Tracks since when a process has been almost idle, judging by the processor time that it uses."""

    def __init__(self, now: float, used: float) -> None:
        self.newest = now
        """The last time at which the process was seen to work."""
        self._used = used

    def note(self, now: float, used: float) -> None:
        """Record how much processor time it has used by now."""
        if used - self._used >= max(_MIN_TIME, _MIN_LOAD * (now - self.newest)):
            self.newest, self._used = now, used
