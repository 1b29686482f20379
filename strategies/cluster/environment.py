"""Environment: who started the processes, how many there are, and which of them this one is."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ..errors import ConfigError

Launcher = Literal["none", "torchrun", "slurm", "mpi", "ray", "kubeflow"]

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500  # torchrun's
NODE_FOLDER = "echelonNODE_FOLDER"
"""The variable that tells a worker of an elastic run where its agent keeps what outlives it."""

_STARTED_BY: dict[Launcher, str] = {
    "none": "Echelon",
    "torchrun": "torchrun",
    "slurm": "srun",
    "mpi": "mpirun",
    "ray": "Ray Train",
    "kubeflow": "Kubeflow",
}

_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
# Intel MPI's, too; srun sets the first two as well, for programs that were built with MPICH
_MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")

# SLURM numbers the steps that are no srun of the user's (batch script, interactive shell) from here on
_FIRST_RESERVED_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class Environment:
    """The place of this process among all processes of the run, as its launcher's variables tell it.

    Nothing else in the package reads those variables. They are asked from the innermost launcher to the outermost: a
    process that mpirun started on a SLURM cluster has the variables of both, and those of SLURM describe mpirun's
    daemons; a Ray worker inherits those of the job that started Ray.
    """

    launcher: Launcher
    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    num_nodes: int
    main_address: str
    main_port: int | None
    """The port on which rank 0 keeps the store; None lets it take any, where nobody else has to know it beforehand."""
    missing: tuple[str, ...] = ()
    """Variables that nobody set and that nodes which are started one by one need."""

    @property
    def is_external(self) -> bool:
        """Whether somebody else started the processes, so that none is to be started."""
        return self.launcher != "none"

    @classmethod
    def detect(cls, environ: Mapping[str, str] = os.environ) -> Environment:
        """Return the environment that these variables describe.

        Raises:
            ConfigError: for variables that contradict each other, are no numbers, or are incomplete.
        """
        if "TORCHELASTIC_RUN_ID" in environ:
            return _torchrun(environ)
        if _has(environ, "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            return _torchrun(environ, "ray" if _is_ray_worker(environ) else "torchrun")
        for names in (_OPEN_MPI, _MPICH):
            if _has(environ, *names):
                return _mpi(environ, names)
        if _is_srun_task(environ):
            return _slurm(environ)
        if _has(environ, "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            return _one_process_a_machine(environ)
        return _nobody(environ)

    def describe(self) -> str:
        """Return one line on the processes, for the start of a run."""
        text = f"{self.world_size} process{'es' if self.world_size > 1 else ''}"
        if self.num_nodes > 1:
            is_even = self.local_world_size * self.num_nodes == self.world_size
            text += f" on {self.num_nodes} nodes ({self.local_world_size} {'each' if is_even else 'on this one'})"
        text += f", started by {_STARTED_BY[self.launcher]}"
        return f"{text}; store at {self.main_address}:{self.main_port}" if self.main_port is not None else text


def node_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return where the elastic agent of this worker keeps what outlives it; None if no such agent has started it."""
    return Path(environ[NODE_FOLDER]) if NODE_FOLDER in environ else None


def reconcile(environment: Environment, num_devices: int | None, num_nodes: int | None) -> Environment:
    """Return the environment of a run that asks for these numbers; None leaves a number to the environment.

    Raises:
        ConfigError: if the processes that exist are not those asked for, or if nodes that are started one by one were
            not told their rank and where to meet.
    """
    if environment.is_external:
        _compare(environment, num_devices, num_nodes)
        return environment
    nodes, local_world_size = num_nodes or 1, num_devices or 1
    if environment.node_rank >= nodes:
        raise ConfigError(
            f"NODE_RANK={environment.node_rank}, but num_nodes={nodes}; ranks of nodes go from 0 to {nodes - 1}. "
            "Give Trainer(num_nodes=...) the number of machines, or unset NODE_RANK on a single one."
        )
    if nodes > 1 and environment.missing:
        missing = " and ".join(environment.missing) + (" are" if len(environment.missing) > 1 else " is")
        raise ConfigError(
            f"num_nodes={nodes}, but {missing} not set and no launcher was found. "
            f"Set, on each node, MASTER_ADDR to an address of node 0, MASTER_PORT to a free port of it (default "
            f"{DEFAULT_PORT}) and NODE_RANK to 0 ... {nodes - 1}; or start the program with srun, mpirun or "
            f"`echelon launch --nnodes {nodes}`."
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


def set_defaults(variables: Mapping[str, str]) -> None:
    """Set environment variables, for libraries and for processes started from here, that the user has not set."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def _compare(environment: Environment, num_devices: int | None, num_nodes: int | None) -> None:
    launcher = _STARTED_BY[environment.launcher]
    if num_nodes is not None and num_nodes != environment.num_nodes:
        raise ConfigError(
            f"num_nodes={num_nodes}, but {launcher} started processes on {environment.num_nodes} node(s); "
            f"leave num_nodes out, or let {launcher} start them on {num_nodes}."
        )
    if num_devices is not None and num_devices != environment.local_world_size:
        raise ConfigError(
            f"devices={num_devices}, but {launcher} started {environment.local_world_size} process(es) on this node, "
            f"one for each device; leave devices out, or let {launcher} start {num_devices}."
        )


# --- each launcher's variables ----------------------------------------------------------------------------------------


def _nobody(environ: Mapping[str, str]) -> Environment:
    node_rank = _first(environ, "NODE_RANK", "GROUP_RANK")
    missing = [] if environ.get("MASTER_ADDR") else ["MASTER_ADDR"]
    if node_rank is None:
        missing.append("NODE_RANK")
    return Environment(
        launcher="none",
        rank=0,
        local_rank=0,
        node_rank=node_rank or 0,
        world_size=1,
        local_world_size=1,
        num_nodes=1,
        main_address=environ.get("MASTER_ADDR") or LOOPBACK,
        main_port=_first(environ, "MASTER_PORT"),
        missing=tuple(missing),
    )


def _torchrun(environ: Mapping[str, str], launcher: Launcher = "torchrun") -> Environment:
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE") or 1
    node_rank = _first(environ, "GROUP_RANK", "NODE_RANK")
    if node_rank is None:
        node_rank = rank // local_world_size
    # Ray sets none; where its nodes have different numbers of workers, this is at least what this one can know
    num_nodes = _first(environ, "GROUP_WORLD_SIZE") or max(node_rank + 1, -(-world_size // local_world_size))
    return _checked(
        Environment(
            launcher=launcher,
            rank=rank,
            local_rank=_number(environ, "LOCAL_RANK"),
            node_rank=node_rank,
            world_size=world_size,
            local_world_size=local_world_size,
            num_nodes=num_nodes,
            main_address=environ.get("MASTER_ADDR") or LOOPBACK,
            main_port=_number(environ, "MASTER_PORT"),
        )
    )


def _is_ray_worker(environ: Mapping[str, str]) -> bool:
    return _has(environ, "RAY_JOB_ID") or _has(environ, "RAY_RAYLET_PID")


def _mpi(environ: Mapping[str, str], names: tuple[str, ...]) -> Environment:
    rank, world_size, local_rank, local_world_size = (_number(environ, name) for name in names)
    local_world_size = max(local_world_size, 1)
    num_nodes = world_size // local_world_size
    if num_nodes * local_world_size != world_size or (rank - local_rank) % local_world_size:
        raise ConfigError(
            f"mpirun placed {local_world_size} of {world_size} processes on this node, rank {rank} as its number "
            f"{local_rank}; give every node the same number of slots and fill one after the other (--map-by slot)."
        )
    if num_nodes > 1 and not environ.get("MASTER_ADDR"):
        raise ConfigError(
            f"mpirun started {world_size} processes on {num_nodes} nodes, but MASTER_ADDR is not set, and mpirun does "
            "not tell where rank 0 is; pass it on: mpirun -x MASTER_ADDR=<address of rank 0's node> ..."
        )
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")  # MPICH names its jobs nowhere
    return _checked(
        Environment(
            launcher="mpi",
            rank=rank,
            local_rank=local_rank,
            node_rank=rank // local_world_size,
            world_size=world_size,
            local_world_size=local_world_size,
            num_nodes=num_nodes,
            main_address=environ.get("MASTER_ADDR") or LOOPBACK,
            main_port=_first(environ, "MASTER_PORT") or (_port_of(zlib.crc32(job.encode())) if job else DEFAULT_PORT),
        )
    )


def _is_srun_task(environ: Mapping[str, str]) -> bool:
    """Tell a task of srun from a shell on a cluster, be it of salloc, of sbatch or of ``srun --pty bash``."""
    if not _has(environ, "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID"):
        return False  # salloc and sbatch start no step
    if _number(environ, "SLURM_STEP_ID") >= _FIRST_RESERVED_STEP:
        return False
    has_terminal = "SLURM_PTY_PORT" in environ
    has_shell_name = environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    # within salloc, whose job is named so, a plain `srun -n 4` is no shell
    num_tasks = _first(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") or 1
    return not (has_terminal and has_shell_name if num_tasks > 1 else has_terminal or has_shell_name)


def _slurm(environ: Mapping[str, str]) -> Environment:
    node_rank = _first(environ, "SLURM_NODEID") or 0
    world_size = _first(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") or 1
    per_node = _tasks_per_node(environ, world_size)
    num_nodes = len(per_node)
    if sum(per_node) != world_size or node_rank >= num_nodes:
        raise ConfigError(
            f"SLURM's variables contradict each other: {world_size} tasks in all, {per_node} on its {num_nodes} nodes, "
            f"SLURM_NODEID={node_rank}; start the program itself with srun."
        )
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or LOOPBACK
    job, step = _first(environ, "SLURM_JOB_ID", "SLURM_JOBID") or 0, _number(environ, "SLURM_STEP_ID")
    return _checked(
        Environment(
            launcher="slurm",
            rank=_number(environ, "SLURM_PROCID"),
            local_rank=_number(environ, "SLURM_LOCALID"),
            node_rank=node_rank,
            world_size=world_size,
            local_world_size=per_node[node_rank],
            num_nodes=num_nodes,
            main_address=environ.get("MASTER_ADDR") or (first_host(hosts) if num_nodes > 1 else LOOPBACK),
            main_port=_first(environ, "MASTER_PORT") or _port_of(job + 101 * step),
        )
    )


def _tasks_per_node(environ: Mapping[str, str], world_size: int) -> list[int]:
    """Return [2, 2, 2, 1] for "2(x3),1"."""
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE")
    if not tasks:
        num_nodes = _first(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES") or 1
        return [_first(environ, "SLURM_NTASKS_PER_NODE") or world_size // num_nodes] * num_nodes
    counts: list[int] = []
    for part in tasks.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise ConfigError(
                f"SLURM_STEP_TASKS_PER_NODE={tasks!r} is not of the form '2(x3),1'; start the program itself with srun."
            )
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _one_process_a_machine(environ: Mapping[str, str]) -> Environment:
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if "KUBERNETES_PORT" not in environ and world_size > 1:
        raise ConfigError(
            f"RANK={rank} and WORLD_SIZE={world_size} are set, but LOCAL_RANK or LOCAL_WORLD_SIZE is not, and no "
            "launcher was found; set both of them too, or start the program with torchrun or `echelon launch`."
        )
    if "KUBERNETES_PORT" not in environ:
        return _nobody(environ)
    return _checked(
        Environment(
            launcher="kubeflow",
            rank=rank,
            local_rank=0,
            node_rank=rank,
            world_size=world_size,
            local_world_size=1,
            num_nodes=world_size,
            main_address=environ.get("MASTER_ADDR") or LOOPBACK,
            main_port=_number(environ, "MASTER_PORT"),
        )
    )


# --- reading ----------------------------------------------------------------------------------------------------------


def first_host(nodes: str) -> str:
    """Return the first name of SLURM's short form of a list of nodes: "n003" of "n[003-006,009],login1"."""
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", nodes).split(",")[0]


def _port_of(job: int) -> int:
    """Return a port that all processes of a job derive from its id, below those that kernels give to connections."""
    return 15000 + job % 10000


def _has(environ: Mapping[str, str], *names: str) -> bool:
    return all(environ.get(name) for name in names)


def _first(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the number in the first of these variables that is set."""
    return next((_number(environ, name) for name in names if environ.get(name)), None)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isascii() or not text.isdigit():
        found = f"{name}={text!r} is not a number" if text else f"{name} is not set"
        raise ConfigError(f"{found}, but the other variables of a launcher are there; set it, or unset those.")
    return int(text)


def _checked(environment: Environment) -> Environment:
    e = environment
    for name, number, total in (
        ("rank", e.rank, e.world_size),
        ("local_rank", e.local_rank, e.local_world_size),
        ("node_rank", e.node_rank, e.num_nodes),
    ):
        if number >= total:
            raise ConfigError(
                f"The variables of {_STARTED_BY[e.launcher]} give {name} {number} of {total}; such ranks go from 0 to "
                f"{total - 1}; remove those that another launch has left behind."
            )
    return environment
