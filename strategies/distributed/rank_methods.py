"""RankMethods: what a strategy says of its ranks, and collectives of the data ranks, under the names of Lightning."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from .collectives import Collectives
from .nested import iterate_tensors
from .ranks import Ranks
from .tensor_collectives import ReduceOp

T = TypeVar("T")
P = ParamSpec("P")


def _of_data_ranks(method: Callable[Concatenate[Collectives, P], T]) -> Callable[Concatenate[RankMethods, P], T]:
    """Return a method that calls a collective of the data ranks, with the same signature and docstring."""

    @wraps(method)
    def call(self: RankMethods, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self.ranks.data, *args, **kwargs)

    return call


class RankMethods:
    """What a module or callback asks its strategy about ranks: the names that Lightning's strategies have."""

    ranks: Ranks
    device: torch.device

    @property
    def root_device(self) -> torch.device:
        """Lightning's name for `device`."""
        return self.device

    @property
    def rank(self) -> int:
        """The global rank of this process; rank 0 writes checkpoints and logs."""
        return self.ranks.rank

    global_rank = rank
    """Lightning's name for `rank`."""

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def local_rank(self) -> int:
        """The rank of this process on its node."""
        return self.ranks.environment.local_rank

    @property
    def node_rank(self) -> int:
        """The rank of this process's node."""
        return self.ranks.environment.node_rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.ranks.world_size

    @property
    def data_rank(self) -> int:
        """The index of the slice of every global batch that this process reads."""
        return self.ranks.data_rank

    @property
    def data_size(self) -> int:
        """The number of slices into which every global batch is cut."""
        return self.ranks.data_size

    # --- collectives of the data ranks, as `Collectives` documents them ----------------------------------------------

    all_reduce = _of_data_ranks(Collectives.all_reduce)
    all_gather = _of_data_ranks(Collectives.all_gather)
    reduce_scatter = _of_data_ranks(Collectives.reduce_scatter)
    scatter = _of_data_ranks(Collectives.scatter)
    gather = _of_data_ranks(Collectives.gather)
    all_gather_object = _of_data_ranks(Collectives.all_gather_object)
    send = _of_data_ranks(Collectives.send)
    recv = _of_data_ranks(Collectives.recv)
    isend = _of_data_ranks(Collectives.isend)
    irecv = _of_data_ranks(Collectives.irecv)

    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank has called this. Collective."""
        self.ranks.all.barrier(name)

    barrier.__doc__ = Collectives.barrier.__doc__

    def broadcast(self, data: object, src: int = 0) -> Any:
        """Return the data of the data rank `src` on every rank. Collective."""
        # Data without a gradient, which may exist on one rank only, goes to all ranks, not just to those that hold the
        # same part of the module. Data with a gradient exists on every rank of a replica: it stays among data ranks.
        ranks = self.ranks
        if ranks.data is ranks.all:
            return ranks.all.broadcast(data, src)
        has_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in iterate_tensors(data))
        rows = ranks.all.all_gather_object((ranks.data_rank, has_gradient))
        if (src, False) not in rows:  # or there is no such rank
            return ranks.data.broadcast(data, src)
        return ranks.all.broadcast(data, min(rank for rank, row in enumerate(rows) if row[0] == src))

    broadcast.__doc__ = Collectives.broadcast.__doc__

    def reduce(self, data: Any, reduce_op: ReduceOp = "mean") -> Any:
        """Return `all_reduce` of the data, by default the mean. Collective: every rank calls it."""
        return self.ranks.data.all_reduce(data, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether `decision` is true on all ranks, or on any with ``all=False``. Collective."""
        return bool(self.ranks.all.all_reduce(int(decision), "min" if all else "max"))
