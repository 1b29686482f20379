"""Variables of mpirun: those of Open MPI, and those of MPICH and Intel MPI."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from ...common.errors import ConfigError
from .environment import DEFAULT_PORT, LOOPBACK, Environment
from .variables import first_number, has_all, job_port, read_number

_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
# srun sets the first two as well, for programs built with MPICH
_MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def read_mpi(environ: Mapping[str, str]) -> Environment | None:
    """Return the environment of a process that mpirun started; None for other processes.

    Raises:
        ConfigError: if nodes have different numbers of processes, or do not know where rank 0 is.
    """
    names = next((names for names in (_OPEN_MPI, _MPICH) if has_all(environ, *names)), None)
    if names is None:
        return None
    rank, world_size, local_rank, local_world_size = (read_number(environ, name) for name in names)
    local_world_size = max(local_world_size, 1)
    num_nodes = world_size // local_world_size
    if num_nodes * local_world_size != world_size or (rank - local_rank) % local_world_size:
        raise ConfigError(
            f"mpirun placed {local_world_size} of {world_size} processes on this node, with rank {rank} as local_rank "
            f"{local_rank}; give every node the same number of slots, and fill one node after another (--map-by slot)."
        )
    if num_nodes > 1 and not environ.get("MASTER_ADDR"):
        raise ConfigError(
            f"mpirun started {world_size} processes on {num_nodes} nodes, but MASTER_ADDR is not set, and mpirun does "
            "not tell processes where rank 0 is; pass it with mpirun -x MASTER_ADDR=<address of rank 0's node> ..."
        )
    return Environment(
        launcher="mpirun",
        rank=rank,
        local_rank=local_rank,
        node_rank=rank // local_world_size,
        world_size=world_size,
        local_world_size=local_world_size,
        num_nodes=num_nodes,
        main_address=environ.get("MASTER_ADDR") or LOOPBACK,
        main_port=first_number(environ, "MASTER_PORT") or _derive_port(environ),
    )


def _derive_port(environ: Mapping[str, str]) -> int:
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")  # MPICH does not provide a job id
    return job_port(zlib.crc32(job.encode())) if job else DEFAULT_PORT
