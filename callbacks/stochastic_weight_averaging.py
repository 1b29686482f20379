"""StochasticWeightAveraging: average the weights of the last epochs at a constant learning rate."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..common.errors import ConfigError
from .helpers.averaged_weights import AverageOne
from .run import Run
from .weight_averaging import WeightAveraging


class StochasticWeightAveraging(WeightAveraging):
    """Average the weights at the end of each of the last epochs (SWA, Izmailov et al. 2018).

    From the first of these epochs on, the learning rate is annealed from its current value to `swa_lrs`, as in torch's
    ``SWALR``, and stays there; the module's schedulers no longer change it. Buffers are averaged like weights,
    including running statistics of BatchNorm, instead of a pass over the data at the end (``update_bn``). The hooks run
    on every rank, as in `WeightAveraging`.

    Args:
        swa_lrs: the final learning rate, one for all or one for each parameter group.
        swa_epoch_start: the first epoch to average, counted from 1, or as a fraction of ``max_epochs``.
        annealing_epochs: the number of epochs over which the learning rate is annealed; 0: at once.
        annealing_strategy: ``cos`` or ``linear``.
        avg_fn: as in `WeightAveraging`.
        device: the device of the average; by default that of the module.

    Raises:
        ConfigError: for an invalid argument, several optimizers, or a fraction of an unlimited number of epochs.

    Example::

        averaging = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1)
        Trainer(max_epochs=3, callbacks=averaging).fit(module, train_loader)
    """

    def __init__(
        self,
        swa_lrs: float | Sequence[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: Literal["cos", "linear"] = "cos",
        avg_fn: AverageOne | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(device, use_buffers=True, avg_fn=avg_fn)
        lrs = [swa_lrs] if isinstance(swa_lrs, int | float) else list(swa_lrs)
        if not lrs or any(not lr > 0 for lr in lrs):
            raise ConfigError(f"swa_lrs must be a learning rate above 0, or one for each group, got {swa_lrs!r}.")
        is_fraction = isinstance(swa_epoch_start, float)
        if not (0.0 <= swa_epoch_start <= 1.0 if is_fraction else swa_epoch_start >= 1):
            raise ConfigError(
                f"swa_epoch_start must be an epoch from 1, or a fraction up to 1.0, got {swa_epoch_start!r}."
            )
        if annealing_epochs < 0:
            raise ConfigError(f"annealing_epochs must be 0 or more, got {annealing_epochs}.")
        if annealing_strategy not in ("cos", "linear"):
            raise ConfigError(f"annealing_strategy must be 'cos' or 'linear', got {annealing_strategy!r}.")
        self._swa_lrs, self._epoch_start = lrs, swa_epoch_start
        self._annealing_epochs, self._annealing_strategy = annealing_epochs, annealing_strategy
        self._first_epoch = 0
        self._lrs_before: list[float] = []
        self._lrs: list[float] = []
        self._weight = 0.0
        """How much of `swa_lrs` is in this epoch's rates."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether the epoch is one of the last ones, which are averaged."""
        return epoch_idx is not None and epoch_idx >= self._first_epoch

    def state_dict(self) -> dict[str, object]:
        """Return the average, and the learning rates from which the annealing started."""
        state = super().state_dict()
        return {**state, "lrs_before": self._lrs_before} if state or self._lrs_before else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep a saved average until `on_fit_start`."""
        self._lrs_before = list(state_dict["lrs_before"])
        if "count" in state_dict:
            super().load_state_dict(state_dict)

    def on_fit_start(self, trainer: Run, module: nn.Module) -> None:
        """Find the first epoch to average."""
        if len(trainer.optimizers) != 1:
            raise ConfigError(
                f"StochasticWeightAveraging needs 1 optimizer, got {len(trainer.optimizers)}; remove the callback."
            )
        groups = len(trainer.optimizers[0].param_groups)
        if len(self._swa_lrs) not in (1, groups):
            raise ConfigError(
                f"swa_lrs must have 1 value or {groups}, the number of parameter groups, got {self._swa_lrs}; give one "
                "for each group."
            )
        start = self._epoch_start
        if isinstance(start, float):
            if trainer.max_epochs == -1:
                raise ConfigError(f"swa_epoch_start={start} is a fraction of max_epochs=-1 (no limit); give an epoch.")
            start = int(trainer.max_epochs * start)
        self._first_epoch = max(start - 1, 0)
        if 0 <= trainer.max_epochs <= self._first_epoch and trainer.is_global_zero:
            warnings.warn(
                f"StochasticWeightAveraging(swa_epoch_start={self._epoch_start}) averages nothing in "
                f"max_epochs={trainer.max_epochs}; lower it, or train longer.",
                stacklevel=2,
            )
        super().on_fit_start(trainer, module)

    def on_train_epoch_start(self, trainer: Run, module: nn.Module) -> None:
        """Compute this epoch's learning rates."""
        passed = trainer.current_epoch - self._first_epoch
        groups = trainer.optimizers[0].param_groups
        if passed < 0:
            self._lrs_before, self._lrs = [], []
            return
        done = min(1.0, passed / self._annealing_epochs) if self._annealing_epochs else 1.0
        self._weight = done if self._annealing_strategy == "linear" else (1 - math.cos(math.pi * done)) / 2
        self._take_rates(groups)

    def _take_rates(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Compute the rates of all groups, some of which may be new: they begin at their own.

        These keep it if `swa_lrs` has a rate for each group that there was.
        """
        self._lrs_before += [float(group["lr"]) for group in groups[len(self._lrs_before) :]]
        targets = self._swa_lrs * len(groups) if len(self._swa_lrs) == 1 else self._swa_lrs
        before, weight = self._lrs_before, self._weight
        self._lrs = [b * (1 - weight) + t * weight for b, t in zip(before, targets, strict=False)]

    def on_train_batch_start(self, trainer: Run, module: nn.Module, batch: object, batch_idx: int) -> None:
        """Set this epoch's learning rates, which a scheduler may have changed."""
        if self._lrs and len(self._lrs_before) < len(trainer.optimizers[0].param_groups):
            self._take_rates(trainer.optimizers[0].param_groups)
        for group, lr in zip(trainer.optimizers[0].param_groups, self._lrs, strict=False):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
