"""ConfiguredOptimizer: the optimizer and scheduler that a config names, in place of the module's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ....common.errors import ConfigError
from ...module.train_module import TrainModule
from ..instantiate import TARGET, build_targets, check_targets, is_target

_OF_TRAINER: Final = ("interval", "frequency", "monitor", "strict", "name")
"""Keys of a scheduler that say when to step it."""


def check_optimizer(values: Mapping[str, Any]) -> None:
    """Check the keys ``optimizer`` and ``lr_scheduler`` of a config.

    Raises:
        ConfigError: if they do not name an optimizer, or a scheduler beside an optimizer.
    """
    optimizer, scheduler = values.get("optimizer"), values.get("lr_scheduler")
    for key, value, example in (
        ("optimizer", optimizer, "torch.optim.AdamW, lr: 1e-3"),
        ("lr_scheduler", scheduler, "torch.optim.lr_scheduler.StepLR, step_size: 3"),
    ):
        if value is not None and not is_target(value):
            raise ConfigError(f"{key}={value!r} names no class; write {key}: {{{TARGET}: {example}}}.")
    if scheduler is not None and optimizer is None:
        raise ConfigError(
            f"lr_scheduler={scheduler!r} needs an optimizer in the config, got optimizer=None; add one, or leave both "
            "to the module."
        )
    check_targets(optimizer, "optimizer", Optimizer, provided=("params",))
    if scheduler is not None:
        arguments = {name: value for name, value in scheduler.items() if name not in _OF_TRAINER}
        check_targets(arguments, "lr_scheduler", LRScheduler, provided=("optimizer",))


@dataclass
class ConfiguredOptimizer:
    """The ``configure_optimizers`` of a module whose config names an optimizer, for all of its trained parameters."""

    module: TrainModule
    optimizer: Mapping[str, object]
    scheduler: Mapping[str, Any] | None

    def __call__(self) -> object:
        """Return the optimizer, and the scheduler if there is one."""
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        optimizer = build_targets(self.optimizer, "optimizer", params=trained)
        if self.scheduler is None:
            return optimizer
        when = {name: value for name, value in self.scheduler.items() if name in _OF_TRAINER}
        arguments = {name: value for name, value in self.scheduler.items() if name not in _OF_TRAINER}
        scheduler = build_targets(arguments, "lr_scheduler", optimizer=optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **when}}
