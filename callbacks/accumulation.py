"""GradientAccumulationScheduler: how many micro-batches make a step, by epoch."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ..strategies.errors import ConfigError
from .callback import Callback
from .run import Run


class GradientAccumulationScheduler(Callback):
    """Set ``accumulate_grad_batches`` when an epoch begins.

    Args:
        scheduling: epoch (from 0) to the micro-batches of a step from that epoch on; 1 before the first that is named.

    Raises:
        ConfigError: for no epochs, an epoch below 0 or a number of micro-batches below 1.
    """

    def __init__(self, scheduling: Mapping[int, int]) -> None:
        if not scheduling:
            raise ConfigError(
                "scheduling={} is empty; give the micro-batches of a step by epoch, such as {0: 1, 4: 2}."
            )
        for epoch, count in scheduling.items():
            if not _is_at_least(epoch, 0):
                raise ConfigError(f"scheduling has the epoch {epoch!r}; give epochs as whole numbers from 0.")
            if not _is_at_least(count, 1):
                raise ConfigError(f"scheduling[{epoch}]={count!r} is not possible; give 1 or more micro-batches.")
        self.scheduling = {0: 1, **scheduling}

    def going_to_accumulate_grad_batches(self) -> bool:
        """Return whether any epoch accumulates."""
        return any(count > 1 for count in self.scheduling.values())

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Return the micro-batches of a step in an epoch."""
        return self.scheduling[max(start for start in self.scheduling if start <= epoch)]

    def on_train_start(self, trainer: Run, module: nn.Module) -> None:
        """Refuse a second source of the same number."""
        if trainer.accumulate_grad_batches != 1:
            raise ConfigError(
                f"GradientAccumulationScheduler sets accumulate_grad_batches itself, but the trainer has "
                f"accumulate_grad_batches={trainer.accumulate_grad_batches}; leave it out of one of them."
            )

    def on_train_epoch_start(self, trainer: Run, module: nn.Module) -> None:
        """Set this epoch's number."""
        trainer.accumulate_grad_batches = self.get_accumulate_grad_batches(trainer.current_epoch)


def _is_at_least(value: object, smallest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= smallest
