"""Checks of finders before a fit: what each sets must exist, and nothing else may set it."""

from __future__ import annotations

from collections.abc import Sequence

from ...callbacks.accumulation import GradientAccumulationScheduler
from ...callbacks.batch_size_finder import BatchSizeFinder
from ...callbacks.callback import Callback
from ...callbacks.learning_rate_finder import LearningRateFinder
from ...common.errors import ConfigError
from ...strategies import Strategy
from ..module.data_module import DataModule
from ..module.train_module import TrainModule
from ..session.settings import Settings
from .attribute import find_attribute


def check_finders(
    callbacks: Sequence[Callback],
    module: TrainModule,
    datamodule: DataModule | None,
    settings: Settings,
    strategy: Strategy,
) -> None:
    """Check that the finders among callbacks can search before a fit.

    Raises:
        ConfigError: for a setting or another callback that one cannot be combined with.
        ModuleError: if the module lacks what one sets.
    """

    def find(*names: str) -> str | None:
        return find_attribute((module, datamodule), names)

    for finder in callbacks:
        if not isinstance(finder, LearningRateFinder | BatchSizeFinder):
            continue
        finder.validate(module, strategy, find)
        if not isinstance(finder, BatchSizeFinder):
            continue
        if settings.reload_dataloaders_every_n_epochs:
            raise ConfigError(
                "BatchSizeFinder needs one loader for the whole fit, got reload_dataloaders_every_n_epochs="
                f"{settings.reload_dataloaders_every_n_epochs}; leave it out, or give the size that was found."
            )
        if any(isinstance(one, GradientAccumulationScheduler) for one in callbacks):
            raise ConfigError(
                "BatchSizeFinder and GradientAccumulationScheduler both set the micro-batches of a step, found "
                f"callbacks={[type(one).__name__ for one in callbacks]}; remove one, or give the size that was found."
            )
