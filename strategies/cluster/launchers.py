"""Table of launchers, and detection of the one that started this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from ...common.errors import ConfigError
from .environment import ENVIRON, LOOPBACK, Environment
from .kubeflow import read_kubeflow
from .mpi import read_mpi
from .ray import read_ray
from .slurm import read_slurm
from .torchrun import read_torchrun
from .variables import first_number, has_all, read_number

# Innermost launcher first: a process that mpirun started on a SLURM cluster has the variables of both, and SLURM's
# describe mpirun's daemons; a Ray worker inherits those of the job that started Ray.
LAUNCHERS: Final[tuple[Callable[[Mapping[str, str]], Environment | None], ...]] = (
    read_ray,
    read_torchrun,
    read_mpi,
    read_slurm,
    read_kubeflow,
)


def detect_environment(environ: Mapping[str, str] = ENVIRON) -> Environment:
    """Return the environment that the launcher's variables describe.

    Raises:
        ConfigError: for variables that contradict each other, are not numbers, or are incomplete.
    """
    for read in LAUNCHERS:
        environment = read(environ)
        if environment is not None:
            _check_ranks(environment)
            return environment
    return _read_manual(environ)


def _check_ranks(environment: Environment) -> None:
    e = environment
    for name, rank, total in (
        ("rank", e.rank, e.world_size),
        ("local_rank", e.local_rank, e.local_world_size),
        ("node_rank", e.node_rank, e.num_nodes),
    ):
        if rank >= total:
            raise ConfigError(
                f"The variables of {e.launcher} give {name} {rank} of {total}, but these ranks go from 0 to "
                f"{total - 1}; remove variables that another launch has left behind."
            )


def _read_manual(environ: Mapping[str, str]) -> Environment:
    """Return the environment of a process without a launcher; its node may be one of several."""
    if has_all(environ, "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") and read_number(environ, "WORLD_SIZE") > 1:
        raise ConfigError(
            f"RANK={environ['RANK']} and WORLD_SIZE={environ['WORLD_SIZE']} are set, but LOCAL_RANK or "
            "LOCAL_WORLD_SIZE is not, and no launcher was found; set both of these too, or start the program with "
            "torchrun or `echelon launch`."
        )
    node_rank = first_number(environ, "NODE_RANK", "GROUP_RANK")
    missing = () if environ.get("MASTER_ADDR") else ("MASTER_ADDR",)
    return Environment(
        launcher="none",
        rank=0,
        local_rank=0,
        node_rank=node_rank or 0,
        world_size=1,
        local_world_size=1,
        num_nodes=1,
        main_address=environ.get("MASTER_ADDR") or LOOPBACK,
        main_port=first_number(environ, "MASTER_PORT"),
        missing=missing if node_rank is not None else (*missing, "NODE_RANK"),
    )
