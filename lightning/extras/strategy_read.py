"""A trainer's strategy with what programs for Lightning read of it: the module and the optimizers."""

from __future__ import annotations

import weakref
from functools import cache
from typing import TYPE_CHECKING, Any

from ...common.errors import RunError
from ...strategies import Strategy

if TYPE_CHECKING:
    from ..trainer import LightningTrainer

_TRAINER = "_trainer_of_program"


class StrategyRead:
    """The attributes of Lightning's strategies that are its trainer's here."""

    @property
    def _trainer(self) -> Any:
        return self.__dict__[_TRAINER]()

    @property
    def lightning_module(self) -> Any:
        """The module of the current or last run; None before the first."""
        return self._trainer.lightning_module

    @property
    def model(self) -> Any:
        """The module; Lightning's may have a wrapper around it."""
        return self._trainer.model

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers of the current or last fit in this process."""
        try:
            return list(self._trainer.optimizers)
        except RunError:  # it ran in other processes
            return []

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be sent to another process as the strategy that it is; the trainer there shows it again."""
        plain: Any = object.__new__(type(self).__mro__[2])
        plain.__dict__.update({name: value for name, value in self.__dict__.items() if name != _TRAINER})
        _, arguments, *rest = plain.__reduce_ex__(protocol)
        return _make, arguments, *rest


def _make(kind: type[Strategy], *arguments: Any) -> Strategy:
    return kind.__new__(kind, *arguments)


@cache
def _read_as(kind: Any) -> type[Strategy]:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (StrategyRead, kind), names)


def shown(strategy: Strategy, trainer: LightningTrainer) -> Strategy:
    """Return a trainer's strategy, which from now on has these attributes as well."""
    if _TRAINER not in strategy.__dict__:
        kind: Any = type(strategy)
        strategy.__class__ = _read_as(kind)
        strategy.__dict__[_TRAINER] = weakref.ref(trainer)
    return strategy
