"""Variables of the single process in each pod of a Kubeflow PyTorchJob."""

from __future__ import annotations

from collections.abc import Mapping

from .environment import Environment
from .variables import has_all, read_number


def read_kubeflow(environ: Mapping[str, str]) -> Environment | None:
    """Return the environment of a pod's process; None for other processes."""
    if not has_all(environ, "KUBERNETES_PORT", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        return None
    rank, world_size = read_number(environ, "RANK"), read_number(environ, "WORLD_SIZE")
    return Environment(
        launcher="Kubeflow",
        rank=rank,
        local_rank=0,
        node_rank=rank,
        world_size=world_size,
        local_world_size=1,
        num_nodes=world_size,
        main_address=environ["MASTER_ADDR"],
        main_port=read_number(environ, "MASTER_PORT"),
    )
