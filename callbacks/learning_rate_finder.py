"""LearningRateFinder: try increasing learning rates before training, and train with the suggested one."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..common.console import say
from ..common.errors import ConfigError, ModuleError
from ..strategies import Strategy
from .callback import Callback
from .finders.rate_curve import LearningRateCurve, Mode
from .finders.trials import refuse_trials
from .helpers.new_steps import NewSteps
from .run import Run, Tunable

_NAMES: Final = ("lr", "learning_rate")

_log = logging.getLogger(__name__)


class LearningRateFinder(Callback):
    """Train a few steps at increasing learning rates when `fit` begins, undo them, and train with the best rate.

    Afterwards model, optimizer, random numbers, the order of the samples, counters and loggers are as they were: the
    fit equals one whose module was given the rate. The rates of other parameter groups keep their ratio to that of the
    first. `optimal_lr` has the losses, `LearningRateCurve.suggestion` and `LearningRateCurve.plot`. All ranks take
    part, and follow rank 0. A run resumed from a checkpoint with the results does not search again.

    Call `lr_find` in another hook to search at another time, such as ``on_train_epoch_start``.

    Args:
        min_lr: the first rate.
        max_lr: the last rate.
        num_training_steps: the number of rates to try, each for one optimizer step.
        mode: ``"exponential"``: rates grow by equal factors; ``"linear"``: by equal differences.
        early_stop_threshold: end the search at a loss that is this many times the smallest; None: never.
        update_attr: set the module's attribute to the suggested rate, and train with it.
        attr_name: the attribute of the module, or of its ``hparams``; by default ``lr`` or ``learning_rate``.

    Raises:
        ConfigError: for invalid arguments.

    Example::

        finder = LearningRateFinder(num_training_steps=20, early_stop_threshold=None)
        trainer = Trainer(max_epochs=1, callbacks=finder)
        trainer.fit(module, train_loader)  # with module.lr, or module.hparams.lr, as found
        finder.optimal_lr.suggestion()
    """

    SUPPORTED_MODES: ClassVar[tuple[str, ...]] = get_args(Mode)

    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1.0,
        num_training_steps: int = 100,
        mode: Literal["exponential", "linear"] = "exponential",
        early_stop_threshold: float | None = 4.0,
        *,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> None:
        if not 0 < min_lr < max_lr < math.inf:
            raise ConfigError(
                f"LearningRateFinder: min_lr must be above 0 and below max_lr, got min_lr={min_lr} and "
                f"max_lr={max_lr}; give both, such as 1e-6 and 1."
            )
        if num_training_steps < 2:
            raise ConfigError(
                f"LearningRateFinder: num_training_steps must be 2 or more, got {num_training_steps}; give 100, for "
                "example."
            )
        if mode not in self.SUPPORTED_MODES:
            raise ConfigError(
                f"LearningRateFinder: mode must be one of {', '.join(self.SUPPORTED_MODES)}, got {mode!r}."
            )
        if early_stop_threshold is not None and early_stop_threshold <= 1:
            raise ConfigError(
                f"LearningRateFinder: early_stop_threshold must be above 1, got {early_stop_threshold}; give a "
                "multiple of the smallest loss, or None."
            )
        self._min_lr, self._max_lr, self._mode = min_lr, max_lr, mode
        self._num_training_steps, self._early_stop_threshold = num_training_steps, early_stop_threshold
        self._update_attr, self._attr_name = update_attr, attr_name
        self.optimal_lr: LearningRateCurve | None = None
        """The results of the last search; None before the first."""

    # --- the search --------------------------------------------------------------------------------------------------

    def lr_find(self, trainer: Run, module: nn.Module) -> None:
        """Search now, between two optimizer steps, and set the rate. Collective: every rank calls it.

        Raises:
            ConfigError: with more than one optimizer, and as in `validate`.
            ModuleError: as in `validate`.
        """
        tunable = cast(Tunable, trainer)
        if tunable.fast_dev_run:
            _log.info(
                "LearningRateFinder does not search in a development run (fast_dev_run=%s).", tunable.fast_dev_run
            )
            return
        self.validate(module, trainer.strategy, tunable.find_attribute)
        if len(trainer.optimizers) != 1:
            raise ConfigError(
                f"LearningRateFinder needs one optimizer, got {len(trainer.optimizers)} from "
                f"{type(module).__name__}.configure_optimizers: one loss does not tell which of several rates is good; "
                "return one optimizer with groups, or try rates in short runs."
            )
        curve = LearningRateCurve(self._mode, self._min_lr, self._max_lr, self._num_training_steps)
        if trainer.is_global_zero:
            say(f"LearningRateFinder tries {curve.num_training} rates from {self._min_lr:g} to {self._max_lr:g}.")
        tunable.try_steps(_Sweep(curve, self._early_stop_threshold), curve.num_training)
        self.optimal_lr = curve
        rate = curve.suggestion() if self._update_attr else None
        if rate is not None:
            self._train_with(rate, trainer)

    def validate(self, module: nn.Module, strategy: Strategy, find_attribute: Callable[..., str | None]) -> None:
        """Raise if this run cannot be searched; also called in the user's process, before others start.

        Args:
            module: the module to train.
            strategy: the strategy of the run.
            find_attribute: returns the first of some names that the module, the data module or their ``hparams`` have.

        Raises:
            ConfigError: with a strategy that cannot undo steps, or manual optimization.
            ModuleError: if there is no attribute for the rate.
        """
        refuse_trials("LearningRateFinder", module, strategy)
        if self._update_attr and find_attribute(*self._names) is None:
            raise ModuleError(
                f"LearningRateFinder sets {' or '.join(self._names)} in {type(module).__name__} or its hparams, found "
                "none; set one in __init__ and use it in configure_optimizers, name another by attr_name=..., or set "
                "update_attr=False."
            )

    @property
    def _names(self) -> tuple[str, ...]:
        return (self._attr_name,) if self._attr_name else _NAMES

    def _train_with(self, rate: float, trainer: Run) -> None:
        tunable, (optimizer,) = cast(Tunable, trainer), trainer.optimizers
        name = tunable.find_attribute(*self._names)
        assert name is not None
        tunable.set_attribute(name, rate)
        before = _initial_rates(optimizer)
        if trainer.global_step == 0:
            tunable.configure_again()
        if _initial_rates(optimizer) == before:  # after the first step, or in a module that does not use the attribute
            _scale_learning_rates(trainer, rate / before[0] if before[0] else 1.0)
        if trainer.is_global_zero:
            assert self.optimal_lr is not None
            tried = len(self.optimal_lr.results["lr"])
            say(f"LearningRateFinder sets {name} = {rate:.3g}, after {tried} of {self.optimal_lr.num_training} rates.")

    # --- hooks -------------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Run, module: nn.Module) -> None:
        """Search, unless a resumed run already has the results."""
        if self.optimal_lr is None or trainer.global_step == 0:
            self.lr_find(trainer, module)

    def state_dict(self) -> dict[str, object]:
        """Return the results."""
        return {} if self.optimal_lr is None else {"curve": self.optimal_lr.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the results."""
        self.optimal_lr = LearningRateCurve.from_state(state_dict["curve"])


class _Sweep(Callback):
    """Sets the next rate before each step, and records the loss over all ranks after it."""

    def __init__(self, curve: LearningRateCurve, threshold: float | None) -> None:
        self._curve, self._threshold = curve, threshold
        self._ratios: list[float] = []
        self._total = self._num_samples = 0.0
        self._steps = NewSteps()

    def on_train_start(self, trainer: Run, module: nn.Module) -> None:
        self._steps.begin(trainer)
        first, *_ = rates = _initial_rates(trainer.optimizers[0])
        self._ratios = [rate / first if first else 1.0 for rate in rates]
        self._set_rate(trainer.optimizers[0])

    def on_train_batch_end(self, trainer: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        if loss is not None:
            size = cast(Any, module).batch_size_of(batch)
            self._total += float(loss) * size
            self._num_samples += size

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        if not self._steps.has_come(trainer):
            return
        strategy = trainer.strategy
        total, num_samples = strategy.ranks.loss.all_reduce([self._total, self._num_samples], "sum")
        # ranks that share one replica may differ in the last bit
        loss = strategy.ranks.all.broadcast(float(total / num_samples) if num_samples else None)
        self._total = self._num_samples = 0.0
        if len(self._curve.results["loss"]) == self._curve.num_training:
            return
        self._curve.add(loss)
        has_diverged = loss is not None and self._threshold is not None and self._curve.has_diverged(self._threshold)
        if has_diverged or len(self._curve.results["loss"]) == self._curve.num_training:
            trainer.should_stop = True
        else:
            self._set_rate(trainer.optimizers[0])

    def _set_rate(self, optimizer: Optimizer) -> None:
        rate = self._curve.rate(len(self._curve.results["lr"]))
        for group, ratio in zip(optimizer.param_groups, self._ratios, strict=True):
            _set_in_group(group, "lr", rate * ratio)


def _initial_rates(optimizer: Optimizer) -> list[float]:
    """Return the learning rate of each group, before schedulers changed it."""
    return [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]


def _set_in_group(group: dict[str, Any], name: str, value: float) -> None:
    if isinstance(group[name], Tensor):
        with torch.no_grad():
            group[name].fill_(value)  # a compiled or captured step holds this tensor
    else:
        group[name] = value


def _scale_learning_rates(trainer: Run, factor: float) -> None:
    """Scale the learning rates of an optimizer, and the base rates of its schedulers."""
    for group in trainer.optimizers[0].param_groups:
        for name in ("lr", "initial_lr", "max_lr", "min_lr"):
            if name in group:
                _set_in_group(group, name, float(group[name]) * factor)
    for config in trainer.lr_scheduler_configs:
        if hasattr(config.scheduler, "base_lrs"):
            config.scheduler.base_lrs = [base * factor for base in config.scheduler.base_lrs]
