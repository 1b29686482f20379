"""Settings of a run's optimizers and schedulers, updated from what ``configure_optimizers`` returns now."""

from __future__ import annotations

from typing import Any, Final

from torch.optim import Optimizer

from ...common.errors import ModuleError
from ...strategies.torch_internals.optimizers import list_inner_schedulers
from ..data.seed import isolated_rng
from ..module.optimizers import Optimizers, parse_optimizers
from ..session.session import Session
from .kept import restore_on_exit

_OF_OPTIMIZERS: Final = ("optimizer", "_schedulers")
"""Attributes of schedulers that are not settings."""


def configure_again(session: Session) -> None:
    """Give optimizers that have not stepped yet, and their schedulers, the settings that the module returns now.

    The optimizers stay the same objects, as the strategy has set them up.

    Raises:
        ModuleError: if different optimizers, groups or schedulers are returned than before.
    """
    module = session.module
    with (
        isolated_rng(session.strategy.devices),
        restore_on_exit([module], []),
    ):  # the module may keep its optimizers as attributes
        configured = parse_optimizers(module.configure_optimizers())
    _check_alike(session, configured)
    for optimizer, new in zip(session.optimizers, configured.optimizers, strict=True):
        for group, settings in zip(optimizer.param_groups, new.param_groups, strict=True):
            group.update({name: value for name, value in settings.items() if name != "params"})
    for config, new_config in zip(session.schedulers, configured.schedulers, strict=True):
        _take_over(config.scheduler, new_config.scheduler)


def _check_alike(session: Session, configured: Optimizers) -> None:
    def shape(optimizers: Any, schedulers: Any) -> list[Any]:
        return [
            [_shape_of_optimizer(each) for each in optimizers],
            [type(config.scheduler).__name__ for config in schedulers],
        ]

    before, now = shape(session.optimizers, session.schedulers), shape(configured.optimizers, configured.schedulers)
    if before != now:
        raise ModuleError(
            f"{type(session.module).__name__}.configure_optimizers must return the same kinds of optimizers, groups "
            f"and schedulers each time, got {now} after {before}; let only their settings depend on the learning rate."
        )


def _shape_of_optimizer(optimizer: Optimizer) -> tuple[str, int]:
    return type(optimizer).__name__, len(optimizer.param_groups)


def _take_over(scheduler: Any, new: Any) -> None:
    """Give a scheduler the attributes of another one of the same kind, and do the same for schedulers inside it."""
    owner = getattr(new, "optimizer", None)
    settings = {name: value for name, value in vars(new).items() if name not in _OF_OPTIMIZERS and value is not owner}
    vars(scheduler).update(settings)
    inner = zip(list_inner_schedulers(scheduler), list_inner_schedulers(new), strict=True)
    for each, new_each in inner:
        _take_over(each, new_each)
