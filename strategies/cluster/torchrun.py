"""Variables of torchrun, which `echelon launch` and the workers of `fit` also have, or which a user sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from .environment import ENVIRON, LOOPBACK, Environment
from .variables import first_number, has_all, read_number

RUN_ID: Final = "TORCHELASTIC_RUN_ID"
"""The variable that only the processes that an agent starts have, and not the agent."""


def read_torchrun(environ: Mapping[str, str]) -> Environment | None:
    """Return the environment of a process that torchrun started; None for other processes."""
    if has_agent(environ) or has_torch_variables(environ):
        return read_torch_variables(environ, "torchrun")
    return None


def has_torch_variables(environ: Mapping[str, str]) -> bool:
    """Return whether all variables that torch documents for the processes of a run are set."""
    return has_all(environ, "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def has_agent(environ: Mapping[str, str] = ENVIRON) -> bool:
    """Return whether an agent, such as torchrun, has started this process or one of those that started it."""
    return RUN_ID in environ


def agent_hosts_store(environ: Mapping[str, str] = ENVIRON) -> bool:
    """Return whether the agent that started this process hosts the store; otherwise rank 0 does."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def read_torch_variables(environ: Mapping[str, str], launcher: str) -> Environment:
    """Return the environment that torch's variables describe."""
    rank, world_size = read_number(environ, "RANK"), read_number(environ, "WORLD_SIZE")
    local_world_size = read_number(environ, "LOCAL_WORLD_SIZE") or 1
    node_rank = first_number(environ, "GROUP_RANK", "NODE_RANK")
    if node_rank is None:
        node_rank = rank // local_world_size
    # Ray does not set these; if its nodes have different numbers of workers, this is a lower bound
    num_nodes = first_number(environ, "GROUP_WORLD_SIZE") or max(node_rank + 1, -(-world_size // local_world_size))
    return Environment(
        launcher=launcher,
        rank=rank,
        local_rank=read_number(environ, "LOCAL_RANK"),
        node_rank=node_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        num_nodes=num_nodes,
        main_address=environ.get("MASTER_ADDR") or LOOPBACK,
        main_port=read_number(environ, "MASTER_PORT"),
    )
