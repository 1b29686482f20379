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


def examine_machine(patient: Patient) -> list[Finding]:
    """Return all that is wrong with this machine."""
    return [finding for check in _list_checks(patient).values() for finding in check()]


def describe_checks(patient: Patient) -> list[str]:
    """Return what `examine_machine` looks at, in a few words each."""
    return [*_list_checks(patient)]


def _list_checks(patient: Patient) -> dict[str, Callable[[], Iterator[Finding]]]:
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "torch and its devices": machine.check_torch,
        "limits of this process": machine.check_limits,
        "shared memory": machine.check_shared_memory,
        "the temporary folder": machine.check_temporary,
        f"threads of {patient.num_processes} process(es)": partial(machine.check_threads, patient.num_processes),
        "timeouts": partial(machine.check_timeouts, patient.timeouts),
        "the clock": folder.check_clock,
        f"the folder {patient.run_folder}": partial(folder.check_folder, patient.run_folder),
        "loopback": reachable.check_loopback,
        "network interfaces": reachable.check_interfaces,
        f"the name of {patient.host or 'this host'}": partial(reachable.check_name, patient.host),
    }
    if patient.port is not None:
        way = partial(reachable.check_way, patient.host) if patient.host is not None else reachable.check_port
        checks[f"port {patient.port}"] = partial(way, patient.port)
    return checks
