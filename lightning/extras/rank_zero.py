"""Lightning's functions for rank 0: a decorator whose rank may be assigned, and lines of the log and warnings."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Final

from ...strategies.distributed.rank_zero import current_rank
from ...strategies.distributed.rank_zero import rank_zero_only as own_rank_zero_only
from ...trainer.loggers.dummy import DummyExperiment

__all__ = [
    "LightningDeprecationWarning",
    "rank_prefixed_message",
    "rank_zero_debug",
    "rank_zero_deprecation",
    "rank_zero_experiment",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
]

_log = logging.getLogger("echelon.lightning")


class LightningDeprecationWarning(DeprecationWarning):
    """A warning of something that a later version of Lightning does not have; programs filter by its class."""


class RankZeroOnly:
    """The decorator `rank_zero_only`, with the attribute ``rank`` that libraries read."""

    __wrapped__ = staticmethod(own_rank_zero_only)

    def __init__(self) -> None:
        self._assigned: int | None = None
        self._was: int | None = None

    def __call__(self, fn: Callable[..., object] | None = None, default: object = None) -> Any:
        """Decorate a function so that only rank 0 runs it; it returns `default` on the others."""
        if fn is None:
            return partial(self, default=default)

        @wraps(fn)
        def on_rank_zero(*args: object, **kwargs: object) -> object:
            return fn(*args, **kwargs) if self.rank == 0 else default

        return on_rank_zero

    @property
    def rank(self) -> int:
        """The rank of this process; before there are processes, the launcher's.

        What is assigned counts until the process's own rank changes, as when it joins those of a run.
        """
        own = current_rank()
        return own if self._assigned is None or own != self._was else self._assigned

    @rank.setter
    def rank(self, value: int | None) -> None:
        self._was = current_rank()
        self._assigned = None if value == self._was else value


rank_zero_only: Final = RankZeroOnly()


def rank_zero_experiment(function: Callable[..., object]) -> Callable[..., Any]:
    """Decorate a logger's ``experiment``: ranks other than 0 get one that accepts every call and does nothing."""
    decorated: Callable[..., Any] = rank_zero_only(function, default=DummyExperiment())
    return decorated


@rank_zero_only
def rank_zero_info(*values: object, **options: Any) -> None:
    """Log on rank 0 at level INFO."""
    _log.info(*values, **options)


@rank_zero_only
def rank_zero_debug(*values: object, **options: Any) -> None:
    """Log on rank 0 at level DEBUG."""
    _log.debug(*values, **options)


@rank_zero_only
def rank_zero_warn(message: object, stacklevel: int = 4, category: type[Warning] = UserWarning, **_: object) -> None:
    """Warn on rank 0."""
    warnings.warn(str(message), category, stacklevel=stacklevel)


@rank_zero_only
def rank_zero_deprecation(message: object, stacklevel: int = 5, **_: object) -> None:
    """Warn on rank 0 of a deprecation."""
    warnings.warn(str(message), LightningDeprecationWarning, stacklevel=stacklevel)


def rank_prefixed_message(message: str, rank: int | None) -> str:
    """Return a message with the rank before it."""
    return message if rank is None else f"[rank: {rank}] {message}"
