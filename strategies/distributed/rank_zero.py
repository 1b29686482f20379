"""Blocks and functions that only rank 0 runs, or runs first."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, overload

from ...common.errors import ProcessError, RunError
from ..cluster.launchers import detect_environment
from ..torch_internals.distributed import find_default_store
from .noticeboard import Noticeboard

P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D")


@overload
def rank_zero_only(function: Callable[P, T]) -> Callable[P, T | None]: ...


@overload
def rank_zero_only(*, default: D) -> Callable[[Callable[P, T]], Callable[P, T | D]]: ...


def rank_zero_only(function: Callable[..., object] | None = None, *, default: object = None) -> Any:
    """Decorate a function so that only rank 0 runs it; it returns `default` on the others. No rank waits for another.

    It also works before a process group exists: the rank then comes from the launcher's environment variables.

    Args:
        function: the function; None to give `default` first, as in ``@rank_zero_only(default=0)``.
        default: what it returns on the other ranks.

    Example::

        @rank_zero_only
        def announce(text):
            print(text)

        announce("once, however many processes there are")
    """
    if function is None:
        return functools.partial(rank_zero_only, default=default)

    @functools.wraps(function)
    def on_rank_zero(*args: object, **kwargs: object) -> object:
        return function(*args, **kwargs) if current_rank() == 0 else default

    return on_rank_zero


@contextmanager
def rank_zero_first(*, local: bool = False) -> Iterator[None]:
    """Run a block, such as a download, on rank 0 first, and on the others once rank 0 is done. Collective.

    Args:
        local: let the first rank of each node go first, for files that every node needs on its own disk.

    Raises:
        ProcessError: on the others, if the block failed on the first rank, which raises the original error.
        RunError: with several processes that have not joined a group.

    Example::

        with rank_zero_first(local=True):
            data = TensorDataset(torch.randn(32, 4))  # a download, for instance: once on each node
    """
    import torch.distributed as dist

    environment = detect_environment()
    if not (dist.is_available() and dist.is_initialized()):
        if environment.world_size > 1:
            raise RunError(
                f"rank_zero_first among {environment.world_size} processes needs their process group, which they have "
                "not joined yet; use it in setup() or later, or call torch.distributed.init_process_group first."
            )
        yield
        return
    rank, size, name = dist.get_rank(), dist.get_world_size(), "all"
    if local:
        if environment.world_size != size:
            raise RunError(
                f"rank_zero_first(local=True) cannot tell which ranks share a node: the launcher started "
                f"{environment.world_size} processes, but the process group has {size}; use local=False."
            )
        rank, size, name = environment.local_rank, environment.local_world_size, f"node {environment.node_rank}"
    board = Noticeboard(find_default_store(), f"rank_zero_first/{name}")
    outcome = f"outcome/{board.count(f'uses/{rank}')}"
    with _running_first(board, outcome, size) if rank == 0 else _after_first(board, outcome, size):
        yield


@contextmanager
def _running_first(board: Noticeboard, outcome: str, size: int) -> Iterator[None]:
    error = None
    try:
        yield
    except BaseException as caught:
        error = f"{type(caught).__name__}: {caught}"
        raise
    finally:
        board.post(outcome, error)
        board.remove_once_read(size, outcome)


@contextmanager
def _after_first(board: Noticeboard, outcome: str, size: int) -> Iterator[None]:
    # through the store: a collective would time out
    error = board.wait_for([outcome])[outcome]
    board.remove_once_read(size, outcome)
    if error is not None:
        raise ProcessError(
            f"This rank cannot continue, because the first one failed in rank_zero_first; see its output: {error}"
        )
    yield


def current_rank() -> int:
    """Return the rank of this process; before a process group exists, that of the launcher's environment."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return detect_environment().rank
