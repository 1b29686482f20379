"""The resources that a run holds, seen from outside: memory, processes, ports, files."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MARK: Final = "ECHELON_TEST_MARK"
MEMORY: Final = Path("/dev/shm")


@dataclass(frozen=True)
class Sample:
    """What the run holds of the machine at one moment, between two faults."""

    agent_mib: float
    """Resident memory."""
    server_mib: float
    """The same for the fork server."""
    processes: int
    threads: int
    """Of the agent."""
    descriptors: int
    """Of the agent and the fork server."""
    ports: int
    """On which any of the processes listens."""
    memory_kib: float
    """Of files in shared memory."""
    temporary: int
    """Files in the temporary folder."""


def take_sample(agent: int, mark: str, temporary: Path) -> Sample:
    """Look at a run."""
    family = processes_of(agent, mark)
    server = next(
        (one for one in family if parent(one) == agent and "forkserver" in text(Path(f"/proc/{one}/cmdline"))), agent
    )
    return Sample(
        agent_mib=resident(agent),
        server_mib=resident(server),
        processes=len(family),
        threads=len(names(Path(f"/proc/{agent}/task"))),
        descriptors=len(names(Path(f"/proc/{agent}/fd"))) + len(names(Path(f"/proc/{server}/fd"))),
        ports=len(listening(family)),
        memory_kib=sum(size(path) for folder in node_folders(agent) for path in folder.rglob("*")) / 1024,
        temporary=sum(1 for _ in temporary.rglob("*")),
    )


def processes_of(agent: int, mark: str) -> set[int]:
    """Return a process, all its descendants (zombies included), and those that were detached from it."""
    parents = {int(name): parent(int(name)) for name in names(Path("/proc")) if name.isdigit()}
    family = {agent} if agent in parents else set()
    while more := {one for one, above in parents.items() if above in family} - family:
        family |= more
    return family | {one for one in parents if f"{MARK}={mark}" in text(Path(f"/proc/{one}/environ"))}


def parent(process: int) -> int | None:
    stat = text(Path(f"/proc/{process}/stat"))
    return int(stat.rpartition(")")[2].split()[1]) if stat else None


def resident(process: int) -> float:
    """Return the MiB of a process that are in memory."""
    found = re.search(r"VmRSS:\s+(\d+) kB", text(Path(f"/proc/{process}/status")))
    return int(found[1]) / 1024 if found else 0.0


def listening(family: set[int]) -> set[str]:
    """Return the sockets on which processes listen for TCP."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        rows = [line.split() for line in text(Path(table)).splitlines()[1:]]
        sockets |= {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
    held = set()
    for one in family:
        for name in names(Path(f"/proc/{one}/fd")):
            with contextlib.suppress(OSError):
                held.add(os.readlink(f"/proc/{one}/fd/{name}"))
    return sockets & held


def node_folders(agent: int) -> list[Path]:
    return [path for pattern in ("", ".") for path in MEMORY.glob(f"{pattern}echelon-node-{agent}-*")]


def shared_files(family: set[int]) -> set[Path]:
    """Return the files in shared memory that processes use, including semaphores, except those of a node folder."""
    found = {Path(name) for one in family for name in re.findall(rf"{MEMORY}/\S+", text(Path(f"/proc/{one}/maps")))}
    return {path for path in found if path.parent == MEMORY}


def text(path: Path) -> str:
    """Return what a file holds, if it is still there."""
    with contextlib.suppress(OSError):
        return path.read_bytes().decode(errors="replace")
    return ""


def names(folder: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return []


def size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0
