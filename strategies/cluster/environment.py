"""Environment of a process: its place among the processes of the run, and its environment variables."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ...common.errors import ConfigError

LOOPBACK: Final = "127.0.0.1"
DEFAULT_PORT: Final = 29500  # torchrun's
NODE_FOLDER: Final = "ECHELON_NODE_FOLDER"
"""The variable with which a worker of an elastic run finds its agent's folder, which outlives the worker."""
CALLS_FILE: Final = "ECHELON_CALLS_FILE"
"""The variable with which a worker started by Echelon finds the file in which it records its collectives."""
LAUNCH: Final = "ECHELON_LAUNCH"
"""The variable with which a process that `echelon launch` started finds the launch: its process id."""

ENVIRON: Final[Mapping[str, str]] = os.environ
"""The variables of this process. The only other reader is launch/worker.py, which takes over the caller's."""


@dataclass(frozen=True)
class Environment:
    """Place of this process among all processes of the run, according to its launcher's variables.

    `detect_environment` returns it.
    """

    launcher: str
    """The program that started the processes, for messages; "none" if Echelon starts them."""
    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    num_nodes: int
    main_address: str
    main_port: int | None
    """The port of the store that rank 0 hosts; None for any port, if no one needs to know it beforehand."""
    missing: tuple[str, ...] = ()
    """Variables that are not set, but are required if the nodes are started one by one."""

    @property
    def is_external(self) -> bool:
        """Whether a launcher started the processes, so that Echelon must not."""
        return self.launcher != "none"

    def describe(self) -> str:
        """Return a line about the processes, to print when a run starts."""
        text = f"{self.world_size} process{'es' if self.world_size > 1 else ''}"
        if self.num_nodes > 1:
            is_even = self.local_world_size * self.num_nodes == self.world_size
            text += f" on {self.num_nodes} nodes ({self.local_world_size} {'each' if is_even else 'on this one'})"
        text += f", started by {self.launcher if self.is_external else 'Echelon'}"
        return f"{text}; store at {self.main_address}:{self.main_port}" if self.main_port is not None else text


def node_folder(environ: Mapping[str, str] = ENVIRON) -> Path | None:
    """Return the folder of the elastic agent that started this worker, or None without an agent."""
    return Path(environ[NODE_FOLDER]) if NODE_FOLDER in environ else None


def calls_file(environ: Mapping[str, str] = ENVIRON) -> Path | None:
    """Return the file in which a worker started by Echelon records its collectives; None in other processes."""
    return Path(environ[CALLS_FILE]) if CALLS_FILE in environ else None


def launch_of(environ: Mapping[str, str] = ENVIRON) -> int | None:
    """Return the process id of the `echelon launch` that started this process; None in other processes."""
    return int(environ[LAUNCH]) if environ.get(LAUNCH, "").isdigit() else None


def reconcile_environment(environment: Environment, num_devices: int | None, num_nodes: int | None) -> Environment:
    """Return the environment of a run with the requested numbers; None leaves a number to the environment.

    Raises:
        ConfigError: if the launcher's numbers differ from those requested, or if nodes that are started one by one do
            not know their rank or the main address.
    """
    if environment.is_external:
        _check_requested_numbers(environment, num_devices, num_nodes)
        return environment
    nodes, local_world_size = num_nodes or 1, num_devices or 1
    if environment.node_rank >= nodes:
        raise ConfigError(
            f"NODE_RANK={environment.node_rank}, but num_nodes={nodes}; node ranks go from 0 to {nodes - 1}. Give "
            "Trainer(num_nodes=...) the number of machines, or unset NODE_RANK if there is only one."
        )
    if nodes > 1 and environment.missing:
        missing = " and ".join(environment.missing) + (" are" if len(environment.missing) > 1 else " is")
        raise ConfigError(
            f"num_nodes={nodes}, but {missing} not set and no launcher was found. Set, on each node, MASTER_ADDR to an "
            f"address of node 0, MASTER_PORT to a free port of node 0 (default {DEFAULT_PORT}) and NODE_RANK to 0 ... "
            f"{nodes - 1}; or start the program with srun, mpirun or `echelon launch --nnodes {nodes}`."
        )
    return replace(
        environment,
        rank=environment.node_rank * local_world_size,
        world_size=local_world_size * nodes,
        local_world_size=local_world_size,
        num_nodes=nodes,
        main_address=environment.main_address if nodes > 1 else LOOPBACK,
        main_port=(environment.main_port or DEFAULT_PORT) if nodes > 1 else None,
    )


def num_cores() -> int:
    """Return how many cores this process may use; on systems that do not tell, such as macOS, how many there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_defaults(variables: Mapping[str, str]) -> None:
    """Set environment variables for libraries and child processes, except those that the user has set."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def set_all(variables: Mapping[str, str]) -> None:
    """Set environment variables for libraries and child processes, including those that the user has set."""
    os.environ.update(variables)


def hide_gpus() -> None:
    """Let this process, which has asked for none yet, and its children find no GPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


@contextlib.contextmanager
def overriding_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block, including those that the user has set."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _check_requested_numbers(environment: Environment, num_devices: int | None, num_nodes: int | None) -> None:
    launcher = environment.launcher
    if num_nodes is not None and num_nodes != environment.num_nodes:
        raise ConfigError(
            f"num_nodes={num_nodes}, but {launcher} started processes on {environment.num_nodes} node(s); "
            f"leave num_nodes out, or let {launcher} start them on {num_nodes}."
        )
    if num_devices is not None and num_devices != environment.local_world_size:
        raise ConfigError(
            f"devices={num_devices}, but {launcher} started {environment.local_world_size} process(es) on this node, "
            f"and each uses one device; leave devices out, or let {launcher} start {num_devices}."
        )
