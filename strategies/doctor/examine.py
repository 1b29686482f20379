"""Examination of this machine: all of its checks in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from . import folder, machine, reachable
from .finding import Finding
from .machine import NestedTimeouts


@dataclass(frozen=True)
class Patient:
    """The machine to examine, and the run that it is examined for."""

    run_folder: Path
    num_processes: int = 1
    """On this node."""
    host: str | None = None
    """The node where all nodes meet, if the user names one; no other is ever contacted."""
    port: int | None = None
    """The port on which the store will listen; None if any port will do, or if it already listens."""
    timeouts: NestedTimeouts = field(default_factory=NestedTimeouts)


def examine(patient: Patient) -> list[Finding]:
    """Return all that is wrong with this machine."""
    checks: list[Callable[[], Iterator[Finding]]] = [
        machine.check_torch,
        machine.check_limits,
        machine.check_shared_memory,
        machine.check_temporary,
        partial(machine.check_threads, patient.num_processes),
        partial(machine.check_timeouts, patient.timeouts),
        folder.check_clock,
        partial(folder.check_folder, patient.run_folder),
        reachable.check_loopback,
        reachable.check_interfaces,
        partial(reachable.check_name, patient.host),
    ]
    if patient.port is not None:
        way = partial(reachable.check_way, patient.host) if patient.host is not None else reachable.check_port
        checks.append(partial(way, patient.port))
    return [finding for check in checks for finding in check()]
