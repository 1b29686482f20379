"""A trainer's strategy with what programs for Lightning read of it: the module and the optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol, SupportsIndex, cast

from torch import nn
from torch.optim import Optimizer

from ...common.errors import RunError
from ...strategies import Strategy

_TRAINER = "_trainer_of_program"


class ReadTrainer(Protocol):
    """What is read of a trainer."""

    @property
    def lightning_module(self) -> nn.Module | None:
        """The module of the current or last run."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers of the current or last fit."""


class StrategyRead:
    """The attributes of Lightning's strategies that are its trainer's here."""

    @property
    def lightning_module(self) -> nn.Module | None:
        """The module of the current or last run; None before the first."""
        trainer: ReadTrainer = self.__dict__[_TRAINER]()
        return trainer.lightning_module

    @property
    def model(self) -> nn.Module | None:
        """The module; Lightning's may have a wrapper around it."""
        return self.lightning_module

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of the current or last fit in this process."""
        trainer: ReadTrainer = self.__dict__[_TRAINER]()
        try:
            return list(trainer.optimizers)
        except RunError:  # it ran in other processes
            return []

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Be sent to another process as the strategy that it is; the trainer there adds the attributes again."""
        plain = cast(Strategy, object.__new__(type(self).__mro__[2]))
        plain.__dict__.update({name: value for name, value in self.__dict__.items() if name != _TRAINER})
        _, arguments, *rest = cast(tuple[Any, ...], plain.__reduce_ex__(protocol))
        return _make_instance, arguments, *rest


def _make_instance(kind: type[Strategy], *arguments: type) -> Strategy:
    return kind.__new__(kind, *arguments)


@cache
def _make_readable(kind: type[object]) -> type[object]:
    """Return a strategy's class with the attributes, under its own name."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (StrategyRead, kind), names)


def add_what_is_read(of_trainer: Strategy, trainer: ReadTrainer) -> Strategy:
    """Return a trainer's strategy, which from now on has these attributes as well."""
    if _TRAINER not in of_trainer.__dict__:
        kind = cast(type[Strategy], _make_readable(type(of_trainer)))  # type: ignore[arg-type]
        of_trainer.__class__ = kind
        of_trainer.__dict__[_TRAINER] = weakref.ref(trainer)
    return of_trainer
