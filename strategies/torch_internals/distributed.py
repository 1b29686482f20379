"""Private names of torch.distributed: process groups, DDP, RPC, and processes that it has started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .versions import names_of_torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store
    from torch.distributed.rpc import TensorPipeRpcBackendOptions
    from torch.nn.parallel import DistributedDataParallel

with names_of_torch:  # torch 2.11 to 2.15
    from torch.multiprocessing import _prctl_pr_set_pdeathsig as kill_with_parent  # type: ignore[attr-defined]

__all__ = ["kill_with_parent"]


def find_default_store() -> Store:
    """Return the store through which the processes of the default process group met (torch 2.11 to 2.15)."""
    from torch.distributed import distributed_c10d

    with names_of_torch:
        return distributed_c10d._get_default_store()  # noqa: SLF001


def find_group(name: str) -> ProcessGroup | None:
    """Return the process group with a name; None if there is none (torch 2.11 to 2.15)."""
    with names_of_torch:
        from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
    try:
        return _resolve_process_group(name)  # type: ignore[arg-type]
    except (RuntimeError, ValueError):
        return None


def is_reduced(wrapper: DistributedDataParallel) -> bool:
    """Return whether DDP has averaged all gradients of a backward, or none; torch 2.11 to 2.14."""
    with names_of_torch:
        check = wrapper.reducer._check_reducer_finalized  # noqa: SLF001
    try:
        check()
    except RuntimeError:
        return False
    return True


def ignore_in_ddp(module: torch.nn.Module, names: list[str]) -> None:
    """Make DistributedDataParallel ignore these parameters and buffers of a module, which it has yet to wrap.

    Seen in torch 2.11 to 2.15.
    """
    from torch.nn.parallel import DistributedDataParallel

    with names_of_torch:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)  # noqa: SLF001


def join_rpc(name: str, rank: int, world_size: int, store: Store, options: TensorPipeRpcBackendOptions) -> None:
    """Do what ``torch.distributed.rpc.init_rpc`` does, but over the caller's store (torch 2.11 to 2.15).

    torch prefixes the keys of its store with the number of calls in this process, which can differ between peers.
    """
    from torch.distributed import autograd, rpc

    with names_of_torch:
        autograd._init(rank)  # type: ignore[attr-defined] # noqa: SLF001
        rpc._init_rpc_backend(store=store, name=name, rank=rank, world_size=world_size, rpc_backend_options=options)  # noqa: SLF001


def make_rpc_options(timeout: float) -> TensorPipeRpcBackendOptions:
    """Return options of RPC that sends over sockets only (torch 2.11 to 2.15).

    With shared memory, a thread of each process would poll for messages all the time, on a core of its own.
    """
    from torch.distributed import rpc

    return rpc.TensorPipeRpcBackendOptions(rpc_timeout=timeout, _transports=["uv"])


def is_rpc_initialized() -> bool:
    """Return whether this process has joined RPC already (torch 2.11 to 2.15)."""
    from torch.distributed import rpc

    with names_of_torch:
        return bool(rpc.api._is_current_rpc_agent_set())  # type: ignore[attr-defined] # noqa: SLF001


def list_processes(context: Any) -> list[object]:
    """Return the processes that an agent of torch's elastic has started, for their exit codes (torch 2.11 to 2.15)."""
    with names_of_torch:
        return list(context._pc.processes)  # noqa: SLF001
