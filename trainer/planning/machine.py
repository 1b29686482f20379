"""Machine: the devices that a run is planned for, which need not exist, and their memory and speed."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from torch import nn

from ...common.errors import ConfigError
from ...common.units import in_units
from ...strategies import Hardware
from ...strategies.cluster.environment import ENVIRON
from ...strategies.cluster.launchers import detect_environment
from ...strategies.devices.backends import has_backend
from ...strategies.devices.kinds import CPU, accelerator_of_build
from ...strategies.devices.memory import total_memory
from ...strategies.estimate.live_memory import storages_bytes
from .step_time import DeviceSpeed, Links

_UNITS: Final = {
    **{f"{prefix}B": 1000.0**power for power, prefix in enumerate(("", "k", "M", "G", "T"))},
    **{f"{prefix}iB": 1024.0**power for power, prefix in enumerate(("K", "M", "G", "T"), start=1)},
}
_OF_A_WORKER: Final = 80e6
"""Bytes that a new worker process holds beyond a program that has imported Echelon (seen: 80)."""
_OF_A_RANK: Final = 40e6
"""What a worker takes beside tensors once it trains with others on the CPU (seen: 32 to 48)."""
_OF_COLLECTIVES: Final = 60e6
"""What it takes beyond that where forward communicates: threads, with the stacks of eight more (seen: 60 to 64)."""
_OF_AN_AXIS: Final = 75e6
"""And for each further axis of the ranks: process groups, with the stacks of their threads."""
_LIMITS: Final = (("RLIMIT_DATA", "VmData"), ("RLIMIT_AS", "VmSize"))
"""Limits of a process's memory, and the fields of ``/proc/self/status`` that count what it takes."""
_MOST_DEVICES: Final = 1 << 20
_OF_A_NODE: Final = 8
"""How many devices a node is taken to have where nothing is said."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The hardware that a run is planned for."""

    num_devices: int
    """On all nodes together."""
    num_nodes: int = 1
    memory: float
    """Bytes of each device."""
    is_cpu: bool = False
    margin: float = 0.1
    """The fraction of `memory` that a plan leaves free, for fragmentation and what it does not know."""
    beside_collectives: float = 0.0
    """Bytes of `memory` that a process does not have for tensors where forward communicates."""
    beside_axis: float = 0.0
    """Bytes that it does not have, beyond these, for each axis of the ranks after the first."""
    speed: DeviceSpeed | None = None
    """Of each device; None if unknown."""
    bandwidth: float | None = None
    """Bytes per second from a device to others on its node; None for that of `speed`."""
    node_bandwidth: float | None = None
    """Bytes per second from a device to those on other nodes; None for `bandwidth`."""

    def available(self, axes: Collection[str], *, forward_is_collective: bool) -> float:
        """Return the bytes of a device for tensors if its process communicates along `axes`."""
        if not forward_is_collective:
            return self.memory
        number = len({"dp_shard", *axes})
        return max(0.0, self.memory - self.beside_collectives - self.beside_axis * (number - 1))

    @property
    def devices_of_node(self) -> int:
        """The number of devices on each node."""
        return self.num_devices // self.num_nodes

    @property
    def links(self) -> Links:
        """What connects the devices, whose speed is known."""
        assert self.speed is not None
        inside = self.speed.link_bandwidth if self.bandwidth is None else self.bandwidth
        return Links(inside=inside, between=self.node_bandwidth, devices_of_node=self.devices_of_node)

    def hardware(self, *, uses_processes: bool) -> Hardware:
        """Return the hardware for a strategy that runs one process per device, or one for all devices."""
        # if this build of torch has no collectives for devices, they are checked only as far as CPUs are
        kind = accelerator_of_build()
        kind = kind if not self.is_cpu and has_backend(kind) else CPU
        devices = tuple(range(self.devices_of_node))
        environment = detect_environment({})
        if not uses_processes:
            return Hardware(kind, devices, self.num_nodes, environment)
        environment = replace(
            environment, world_size=self.num_devices, local_world_size=len(devices), num_nodes=self.num_nodes
        )
        return Hardware(kind, devices, self.num_nodes, environment)

    def __str__(self) -> str:
        nodes = f" on {self.num_nodes} nodes" if self.num_nodes > 1 else ""
        plural = "s" if self.num_devices > 1 else ""
        return f"{self.num_devices} device{plural} of {in_units(self.memory)}{nodes}"


def parse_bytes(text: str, argument: str) -> float:
    """Return a number of bytes, given with its unit: GB are 10^9 bytes, GiB 2^30.

    Raises:
        ConfigError: for a text without a unit, or of another form.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    if match is None or match[2].lower() not in units or not 0 < float(match[1]) < math.inf:
        raise ConfigError(f"{argument} must be a number with a unit, got {text!r}; write 80GB or 75GiB, for example.")
    return float(match[1]) * units[match[2].lower()]


def nodes_for(num_devices: int, num_nodes: int | None) -> int:
    """Return the number of nodes of some devices: by default 8 devices a node.

    Raises:
        ConfigError: for numbers of which one does not divide the other.
    """
    if not 1 <= num_devices <= _MOST_DEVICES:
        raise ConfigError(
            f"--devices must be from 1 to {_MOST_DEVICES:,}, got {num_devices}; give the number of all devices."
        )
    number = num_nodes if num_nodes is not None else max(1, -(-num_devices // _OF_A_NODE))
    if number < 1 or num_devices % number:
        found = f"got {number}" if num_nodes is not None else f"got none, and {_OF_A_NODE} on each leave a rest"
        divisors = [d for d in range(1, num_devices + 1) if num_devices % d == 0]
        raise ConfigError(
            f"--nodes must divide --devices {num_devices}, {found}; give --nodes one of {divisors[:8]}, or another "
            "number of devices."
        )
    return number


def this_machine(hardware: Hardware, module: nn.Module | None = None, *, is_worker: bool = False) -> Machine:
    """Return the machine that this process runs on, limited to what a run would use.

    Args:
        hardware: the devices.
        module: counts as if it took nothing here yet, as the plan counts it itself.
        is_worker: whether this is a worker process like those that a run would start.
    """
    memory = total_memory(hardware.device(0)) if hardware.device_type != CPU else None
    if memory is not None:
        return Machine(num_devices=len(hardware.devices), memory=memory)
    number = len(hardware.devices)
    own = storages_bytes([*module.parameters(), *module.buffers()]) if module is not None else 0
    of_host, of_process = memory_of_host() / number, memory_of_process() + own
    return Machine(
        num_devices=number,
        memory=max(1.0, min(of_host, of_process) - _OF_A_RANK - (0.0 if is_worker else _OF_A_WORKER)),
        is_cpu=True,
        margin=_margin_on_cpu(is_limited=of_process < of_host),
        beside_collectives=_OF_COLLECTIVES,
        beside_axis=_OF_AN_AXIS,
    )


def _margin_on_cpu(*, is_limited: bool) -> float:
    """Return the fraction of memory that stays free on a CPU, where `Machine.memory` excludes all but tensors.

    glibc keeps what is freed, up to a quarter of what training takes (seen: 0.15 to 0.26), unless a constant threshold
    makes it return larger blocks. A limit of the process (`is_limited`) does not depend on other programs.
    """
    tunables = ENVIRON.get("GLIBC_TUNABLES", "")
    returns_freed = "MALLOC_MMAP_THRESHOLD_" in ENVIRON or "glibc.malloc.mmap_threshold=" in tunables
    if not returns_freed:
        return 0.25
    return 0.02 if is_limited else 0.05


def memory_of_process() -> float:
    """Return the bytes that a process like this one may still take, within its limits; infinity if it has none."""
    if sys.platform == "win32" or not Path("/proc/self/status").exists():
        return math.inf
    import resource

    taken = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    room = math.inf
    for limit, field in _LIMITS:
        most = resource.getrlimit(getattr(resource, limit))[0]
        if most != resource.RLIM_INFINITY:
            room = min(room, max(0.0, most - float(taken[field].split()[0]) * 1024))
    return room


def lift_limits() -> None:
    """Let this process take as much memory as it may permit itself, for what a run does not do."""
    if sys.platform == "win32":
        return
    import resource

    for name, _ in _LIMITS:
        limit = getattr(resource, name)
        most = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (most, most))


def memory_of_host(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the bytes that processes can still use here: of the machine, or of this container (cgroups 2 and 1).

    Raises:
        ConfigError: on Windows, which is not asked.
    """
    if not Path("/proc/meminfo").exists():
        if hasattr(os, "sysconf"):  # macOS: all that there is
            return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        raise ConfigError(f"Memory cannot be read on this system, {sys.platform}; give --memory 16GB, or a strategy.")
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    room = float(fields["MemAvailable"].split()[0]) * 1024
    for most, used, files in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, taken = _number_in(cgroup / most), _number_in(cgroup / used)
        if limit is None or taken is None:
            continue
        stat = (cgroup / most).with_name("memory.stat")
        counts = dict(line.split() for line in stat.read_text().splitlines()) if stat.is_file() else {}
        # files that were read some time ago make room when it is needed
        room = min(room, max(0.0, limit - taken + float(counts.get(files, 0))))
    return room


def _number_in(file: Path) -> float | None:
    text = file.read_text().strip() if file.is_file() else ""
    return float(text) if text.isdigit() else None
