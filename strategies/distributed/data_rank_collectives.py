"""Collectives of the data ranks, as methods of a strategy, for the user's module and callbacks."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

from .collectives import Collectives
from .nested import iterate_tensors

T = TypeVar("T")
P = ParamSpec("P")


class HasDataRanks(Protocol):
    """The attributes of a strategy that these methods use."""

    collectives: Collectives
    data_collectives: Collectives

    @property
    def data_rank(self) -> int:
        """The index of the slice of every global batch that this process reads."""


def of_data_ranks(
    method: Callable[Concatenate[Collectives, P], T], ranks: str = "data_collectives"
) -> Callable[Concatenate[HasDataRanks, P], T]:
    """Return a method that calls one of the strategy's collectives, with the same signature and docstring."""

    @wraps(method)
    def call(strategy: HasDataRanks, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(getattr(strategy, ranks), *args, **kwargs)

    return call


@wraps(Collectives.broadcast)
def broadcast(self: HasDataRanks, data: Any, src: int = 0) -> Any:
    """Return the data of the data rank `src` on every rank. Collective: every rank calls it."""
    # Data without a gradient, which may exist on one rank only, goes to all ranks, not just to those that hold the same
    # part of the module. Data with a gradient exists on every rank of a replica, so it stays among the data ranks.
    if self.data_collectives is self.collectives:
        return self.collectives.broadcast(data, src)
    has_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in iterate_tensors(data))
    rows = self.collectives.all_gather_object((self.data_rank, has_gradient))
    if (src, False) not in rows:  # or there is no such rank
        return self.data_collectives.broadcast(data, src)
    return self.collectives.broadcast(data, min(rank for rank, row in enumerate(rows) if row[0] == src))
