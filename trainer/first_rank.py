"""What only the first rank finds out, or does, and all ranks need to know."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..strategies import Strategy
from ..strategies.errors import EchelonError

T = TypeVar("T")


def on_first_rank(strategy: Strategy, function: Callable[[], T]) -> T:
    """Return what `function` returns on rank 0; its error is raised on all ranks. Collective: every rank calls it."""
    found: tuple[T | None, EchelonError | None] = (None, None)
    if strategy.rank == 0:
        try:
            found = (function(), None)
        except EchelonError as error:
            found = (None, error)
    value, problem = strategy.broadcast(found)
    if problem is not None:
        raise problem
    return value  # type: ignore[no-any-return]
