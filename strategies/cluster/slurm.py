"""Variables of a task that SLURM's srun started."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...common.errors import ConfigError
from .environment import LOOPBACK, Environment
from .variables import first_number, has_all, job_port, read_number

# SLURM uses numbers from here on for steps that the user did not start with srun: batch script, interactive shell
_FIRST_RESERVED_STEP = 0xFFFFFFF0


def read_slurm(environ: Mapping[str, str]) -> Environment | None:
    """Return the environment of a task of srun; None for other processes.

    Raises:
        ConfigError: for variables that contradict each other.
    """
    if not _is_task(environ):
        return None
    node_rank = first_number(environ, "SLURM_NODEID") or 0
    world_size = first_number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") or 1
    per_node = _tasks_per_node(environ, world_size)
    num_nodes = len(per_node)
    if sum(per_node) != world_size or node_rank >= num_nodes:
        raise ConfigError(
            f"SLURM's variables contradict each other: {world_size} tasks in total, {per_node} on the {num_nodes} "
            f"nodes, SLURM_NODEID={node_rank}; start the program itself with srun."
        )
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or LOOPBACK
    job, step = first_number(environ, "SLURM_JOB_ID", "SLURM_JOBID") or 0, read_number(environ, "SLURM_STEP_ID")
    return Environment(
        launcher="srun",
        rank=read_number(environ, "SLURM_PROCID"),
        local_rank=read_number(environ, "SLURM_LOCALID"),
        node_rank=node_rank,
        world_size=world_size,
        local_world_size=per_node[node_rank],
        num_nodes=num_nodes,
        main_address=environ.get("MASTER_ADDR") or (first_host(hosts) if num_nodes > 1 else LOOPBACK),
        main_port=first_number(environ, "MASTER_PORT") or job_port(job + 101 * step),
    )


def _is_task(environ: Mapping[str, str]) -> bool:
    """Return whether this is a task of srun, and not a shell of salloc, sbatch or ``srun --pty bash``."""
    if not has_all(environ, "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID"):
        return False  # salloc and sbatch start no step
    if read_number(environ, "SLURM_STEP_ID") >= _FIRST_RESERVED_STEP:
        return False
    has_terminal = "SLURM_PTY_PORT" in environ
    has_shell_name = environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    # a plain `srun -n 4` within salloc has the job name of salloc's shell
    num_tasks = first_number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") or 1
    return not (has_terminal and has_shell_name if num_tasks > 1 else has_terminal or has_shell_name)


def _tasks_per_node(environ: Mapping[str, str], world_size: int) -> list[int]:
    """Return [2, 2, 2, 1] for "2(x3),1"."""
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE")
    if not tasks:
        num_nodes = first_number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES") or 1
        return [first_number(environ, "SLURM_NTASKS_PER_NODE") or world_size // num_nodes] * num_nodes
    counts: list[int] = []
    for item in tasks.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if match is None:
            raise ConfigError(
                f"SLURM_STEP_TASKS_PER_NODE={tasks!r} does not have the form '2(x3),1'; start the program itself with "
                "srun."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """Return the first name in SLURM's compact form of a node list: "n003" for "n[003-006,009],login1"."""
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", nodes).split(",")[0]
