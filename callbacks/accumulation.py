"""GradientAccumulationScheduler: set the number of micro-batches per step, by epoch."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ..common.errors import ConfigError
from .callback import Callback
from .run import Run


class GradientAccumulationScheduler(Callback):
    """Set ``accumulate_grad_batches`` when an epoch begins.

    Args:
        scheduling: maps an epoch (from 0) to the micro-batches per step from that epoch on; 1 before the first.

    Raises:
        ConfigError: for an empty mapping, an epoch below 0 or fewer than 1 micro-batch.

    Example::

        Trainer(max_epochs=2, callbacks=GradientAccumulationScheduler({0: 1, 1: 4})).fit(module, train_loader)
    """

    def __init__(self, scheduling: Mapping[int, int]) -> None:
        if not scheduling:
            raise ConfigError(
                "scheduling must name an epoch, got scheduling={}; give micro-batches by epoch, such as {0: 1, 4: 2}."
            )
        for epoch, count in scheduling.items():
            if not _is_at_least(epoch, 0):
                raise ConfigError(f"scheduling: Epoch should be an int from 0 on, got {epoch!r}; give whole numbers.")
            if not _is_at_least(count, 1):
                raise ConfigError(
                    f"scheduling[{epoch}]: Accumulation factor should be an int, got {count!r}; give 1 or more "
                    "micro-batches."
                )
        self.scheduling = {0: 1, **scheduling}

    def going_to_accumulate_grad_batches(self) -> bool:
        """Return whether any epoch accumulates."""
        return any(count > 1 for count in self.scheduling.values())

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Return the micro-batches per step in an epoch."""
        return self.scheduling[max(start for start in self.scheduling if start <= epoch)]

    def on_train_start(self, trainer: Run, module: nn.Module) -> None:
        """Refuse a trainer that also sets the number, and a module that steps by itself."""
        if not getattr(module, "automatic_optimization", True):
            raise ConfigError(
                "GradientAccumulationScheduler needs automatic optimization, got "
                f"{type(module).__name__} with automatic_optimization=False; set that to True, or accumulate in "
                "training_step."
            )
        if trainer.accumulate_grad_batches != 1:
            raise ConfigError(
                "You have set `accumulate_grad_batches` and are using the `GradientAccumulationScheduler`, which "
                f"sets it too, got accumulate_grad_batches={trainer.accumulate_grad_batches}; remove it from one of "
                "them."
            )

    def on_train_epoch_start(self, trainer: Run, module: nn.Module) -> None:
        """Set the number for this epoch."""
        trainer.accumulate_grad_batches = self.get_accumulate_grad_batches(trainer.current_epoch)


def _is_at_least(value: object, smallest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= smallest
