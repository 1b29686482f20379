"""AverageShown: Echelon's weight averaging, with the average where programs for Lightning read and change it."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn

from ...callbacks.helpers.averaged_weights import AveragedWeights
from ...callbacks.run import Run
from ...callbacks.weight_averaging import EMAWeightAveraging as ExponentialAverage
from ...callbacks.weight_averaging import WeightAveraging as Average
from .utilities import known_as


@known_as("WeightAveraging")
class AverageShown(Average):
    """`WeightAveraging` that keeps its average after a fit, and swaps it in by methods that a subclass may wrap."""

    _average_model: AverageRead | None = None
    """The average, under the name that programs read; None before the first fit."""

    @property
    def earlier_state_keys(self) -> tuple[str, ...]:
        """The keys under which 0.2.0 saved it with these names."""
        return ("AverageShown", "ExponentialAverageShown")

    def on_fit_start(self, trainer: Run, module: nn.Module) -> None:
        """Begin an average, or continue that of the checkpoint."""
        super().on_fit_start(trainer, module)
        assert self._average is not None
        self._average_model = AverageRead(self._average, module)
        self._trainer = trainer

    def on_train_epoch_end(self, trainer: Run, module: nn.Module) -> None:
        """Average if `should_update` says so for this epoch."""
        if self.should_update(epoch_idx=trainer.current_epoch):
            self._update()

    def on_validation_start(self, trainer: Run, module: nn.Module) -> None:
        """Give the module the average. Collective: every rank calls it."""
        if self._average is not None:
            self._swap_models(module)

    def on_validation_end(self, trainer: Run, module: nn.Module) -> None:
        """Give the module its own weights back."""
        if self._average is not None:
            self._swap_models(module)

    def on_train_end(self, trainer: Run, module: nn.Module) -> None:
        """Leave the average in the module. Collective: every rank calls it."""
        self._copy_average_to_current(module)

    def on_fit_end(self, trainer: Run, module: nn.Module) -> None:
        """Do nothing: the module has the average already."""

    def _swap_models(self, pl_module: nn.Module) -> None:
        """Exchange the weights of the module and the average, if there is one."""
        if self._is_swapped:
            self._swap_back()
        else:
            self._is_swapped = self._swap_in(self._trainer)

    def _copy_average_to_current(self, pl_module: nn.Module) -> None:
        """Give the module the average, if there is one."""
        self._swap_in(self._trainer)

    def __getstate__(self) -> dict[str, object]:
        """Leave out what belongs to a run in this process."""
        return {**self.__dict__, "_average_model": None, "_average": None, "_trainer": None}


@known_as("EMAWeightAveraging")
class ExponentialAverageShown(AverageShown, ExponentialAverage):
    """`EMAWeightAveraging` with the same."""


class AverageRead:
    """An average and the number of updates in it, as programs read them from torch's ``AveragedModel``.

    Args:
        average: the average.
        module: the module that it is of.
    """

    def __init__(self, average: AveragedWeights, module: nn.Module) -> None:
        self._average, self._of = average, module
        self._copy: nn.Module | None = None

    @property
    def n_averaged(self) -> Tensor:
        """The number of updates."""
        return torch.tensor(self._average.count)

    @property
    def module(self) -> nn.Module:
        """A copy of the module with the average: it is brought up to date whenever it is read."""
        if self._copy is None:
            self._copy = deepcopy(self._of)
        self._copy.load_state_dict(self._average.exchange_in(self._of.state_dict())[0])
        return self._copy
