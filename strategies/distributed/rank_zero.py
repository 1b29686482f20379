"""What only rank 0 does, or does first."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, ParamSpec, TypeVar, overload

from ..cluster.environment import Environment
from ..errors import ProcessError, RunError

P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D")

_PAUSE: Final = 0.05  # seconds between two looks at whether the first rank is through


@overload
def rank_zero_only(function: Callable[P, T]) -> Callable[P, T | None]: ...


@overload
def rank_zero_only(*, default: D) -> Callable[[Callable[P, T]], Callable[P, T | D]]: ...


def rank_zero_only(function: Callable[..., Any] | None = None, *, default: Any = None) -> Any:
    """Decorate a function that only rank 0 calls; the others get `default`. No rank waits for another.

    It works before the processes have joined a group, too: the rank is then what the launcher's variables say.
    """
    if function is None:
        return functools.partial(rank_zero_only, default=default)

    @functools.wraps(function)
    def only_there(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if _rank() == 0 else default

    return only_there


@contextmanager
def rank_zero_first(*, local: bool = False) -> Iterator[None]:
    """Let rank 0 run the block first, for a download say, and the others when it is through. Collective.

    Args:
        local: let the first rank of each node go first, for what every node needs on its own disk.

    Raises:
        ProcessError: on the others, if the block failed on the first, which raises what it raised.
        RunError: with several processes that have not joined a group.
    """
    import torch.distributed as dist

    environment = Environment.detect()
    if not (dist.is_available() and dist.is_initialized()):
        if environment.world_size > 1:
            raise RunError(
                f"rank_zero_first among {environment.world_size} processes needs their process group, which they have "
                "not joined yet; use it in setup() or later, or call torch.distributed.init_process_group before."
            )
        yield
        return
    rank, size, name = dist.get_rank(), dist.get_world_size(), "all"
    if local:
        if environment.world_size != size:
            raise RunError(
                f"rank_zero_first(local=True) cannot tell which ranks share a node: the launcher's variables speak of "
                f"{environment.world_size} processes, the process group has {size}; use local=False."
            )
        rank, size, name = environment.local_rank, environment.local_world_size, f"node {environment.node_rank}"
    turn = _Turn(dist.distributed_c10d._get_default_store(), f"rank_zero_first/{name}", rank, size)
    with turn.lead() if rank == 0 else turn.follow():
        yield


def _rank() -> int:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return Environment.detect().rank


class _Turn:
    """One use of `rank_zero_first`: through the store, since a collective would end at its timeout."""

    def __init__(self, store: Any, prefix: str, rank: int, size: int) -> None:
        number = store.add(f"{prefix}/uses/{rank}", 1)
        self._store = store
        self._size = size
        self._outcome, self._readers = f"{prefix}/{number}/outcome", f"{prefix}/{number}/readers"

    @contextmanager
    def lead(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._store.set(self._outcome, f"{type(error).__name__}: {error}")
            raise
        else:
            self._store.set(self._outcome, "")
        finally:
            self._leave()

    @contextmanager
    def follow(self) -> Iterator[None]:
        while not self._store.check([self._outcome]):  # not wait(), which hears no signal, and has a timeout
            time.sleep(_PAUSE)
        error = self._store.get(self._outcome).decode()
        self._leave()
        if error:
            raise ProcessError(f"The first rank failed in rank_zero_first, so that this one cannot go on: {error}")
        yield

    def _leave(self) -> None:
        """Delete the keys when everybody has read them."""
        if self._store.add(self._readers, 1) == self._size:
            self._store.delete_key(self._outcome)
            self._store.delete_key(self._readers)
