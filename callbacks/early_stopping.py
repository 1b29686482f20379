"""EarlyStopping: end training when a metric no longer improves."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from ..common.errors import ConfigError
from .callback import Callback
from .helpers.monitored import Mode, MonitoredMetric, chosen_mode
from .run import Run

_log = logging.getLogger(__name__)


class EarlyStoppingReason(Enum):
    """The reason why training was stopped."""

    NOT_STOPPED = 0
    STOPPING_THRESHOLD = 1
    DIVERGENCE_THRESHOLD = 2
    PATIENCE_EXHAUSTED = 3
    NON_FINITE_METRIC = 4


class EarlyStopping(Callback):
    """End training when a metric has not improved for `patience` checks in a row.

    Checks are made in `on_train_step_end`, each with a value that was computed at that step: a check that is due before
    the metric is computed waits for it. The trainer still completes ``min_epochs`` and ``min_steps``. The hooks run on
    every rank; a check communicates, and every rank uses rank 0's value.

    Args:
        monitor: the name under which the metric is logged.
        min_delta: the smallest change that counts as an improvement.
        patience: the number of checks without improvement after which training ends.
        verbose: log (level INFO) each improvement; the reason for stopping is always logged.
        mode: whether ``min``, the default, or ``max`` of the metric is better.
        strict: raise if the metric is never logged; otherwise nothing is checked.
        check_finite: stop when the metric is NaN or infinite.
        stopping_threshold: stop as soon as the metric is better than this.
        divergence_threshold: stop as soon as it is worse than this.
        check_on_train_epoch_end: True: check when the epoch ends; False: after each validation; None: after each
            validation if the run has any, else when the epoch ends.
        log_rank_zero_only: log on rank 0 only.

    Raises:
        ConfigError: for an invalid argument, and during training if `strict` and `monitor` is never logged.

    Example::

        stopping = EarlyStopping("val_loss", patience=2, mode="min")
        Trainer(max_epochs=3, callbacks=stopping).fit(module, train_loader, val_loader)
    """

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: Mode | None = None,
        *,
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        if patience < 0:
            raise ConfigError(f"patience must be 0 or more checks, got {patience}.")
        self.monitor, self.mode = monitor, chosen_mode("EarlyStopping", monitor, mode)
        self.min_delta, self.patience = abs(min_delta), patience
        self.verbose, self.strict, self.check_finite = verbose, strict, check_finite
        self.stopping_threshold, self.divergence_threshold = stopping_threshold, divergence_threshold
        self.log_rank_zero_only = log_rank_zero_only
        self._check_on_train_epoch_end = check_on_train_epoch_end
        self._metric = MonitoredMetric("EarlyStopping", monitor, self.mode)
        self._forget()

    def _forget(self) -> None:
        """Forget the checks so far."""
        self.wait_count = 0
        self.stopped_epoch = 0
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message: str | None = None
        self._best = math.inf if self.mode == "min" else -math.inf
        self._is_due = self._was_pending = self._was_stopped = False

    @property
    def best_score(self) -> Tensor:
        """The best value so far; infinite before the first."""
        return torch.tensor(self._best)

    # --- state -------------------------------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """The class with the arguments that distinguish several in one run."""
        return f"{type(self).__qualname__}(monitor={self.monitor!r}, mode={self.mode!r})"

    def state_dict(self) -> dict[str, object]:
        """Return the results of the checks so far, without the settings."""
        return {
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "best_score": self._best if math.isfinite(self._best) else None,
            "stopping_reason": self.stopping_reason.name,
            "stopping_reason_message": self.stopping_reason_message,
            "is_pending": self._metric.is_pending,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the results of the checks."""
        if state_dict["best_score"] is not None:
            self._best = float(state_dict["best_score"])
        self.wait_count = state_dict["wait_count"]
        self.stopped_epoch = state_dict["stopped_epoch"]
        self.stopping_reason = EarlyStoppingReason[state_dict["stopping_reason"]]
        self.stopping_reason_message = state_dict["stopping_reason_message"]
        self._was_pending = state_dict["is_pending"]
        self._was_stopped = self.stopping_reason is not EarlyStoppingReason.NOT_STOPPED

    # --- when to check -----------------------------------------------------------------------------------------------

    def setup(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Forget the previous fit; `load_state_dict` follows if this one is resumed."""
        if stage == "fit":
            self._forget()

    def on_train_start(self, trainer: Run, module: nn.Module) -> None:
        """Continue as the run being resumed: with a check pending, or stopped unless `patience` was increased."""
        if self._was_stopped and not self._has_patience_again():
            trainer.should_stop = True
        self._metric.start(is_pending=self._was_pending)
        self._is_due = self._was_pending = self._was_stopped = False

    def on_validation_end(self, trainer: Run, module: nn.Module) -> None:
        """Mark a check as due, unless checks are made at the end of epochs."""
        if trainer.sanity_checking:
            return
        self._metric.note_validation(trainer.global_step)
        if not self._check_on_train_epoch_end:
            self._is_due = True

    def on_train_epoch_end(self, trainer: Run, module: nn.Module) -> None:
        """Mark a check as due, unless checks are made after validations."""
        self._metric.note_epoch(trainer.global_step)
        at_end = self._check_on_train_epoch_end
        if at_end or (at_end is None and not sum(trainer.num_val_batches)):
            self._is_due = True

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        """Check if a check is due, with rank 0's value; then it is collective: every rank calls it."""
        if not (self._is_due or (self._metric.is_pending and self._metric.is_worth_asking(trainer))):
            return
        self._is_due = False
        self._check(trainer)

    # --- the check ---------------------------------------------------------------------------------------------------

    def _check(self, trainer: Run) -> None:
        """Check rank 0's value, or note that the check is pending. Collective: every rank calls it."""
        value = self._metric.read(trainer, strict=self.strict)
        if value is None:
            return
        if not self.check_finite:
            self._metric.warn_if_nan(trainer, value)
        reason, message = self._judge(value)
        if reason is not EarlyStoppingReason.NOT_STOPPED:
            self.stopping_reason, self.stopping_reason_message = reason, message
            self.stopped_epoch = trainer.current_epoch
            trainer.should_stop = True
        elif not self.verbose:
            return
        if message and (trainer.is_global_zero or not self.log_rank_zero_only):
            level = logging.WARNING if reason is EarlyStoppingReason.NON_FINITE_METRIC else logging.INFO
            _log.log(
                level, "%s%s", f"[rank {trainer.strategy.rank}] " if trainer.strategy.world_size > 1 else "", message
            )

    def _has_patience_again(self) -> bool:
        is_exhausted = self.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED
        return is_exhausted and self.wait_count < self.patience

    def _judge(self, value: float) -> tuple[EarlyStoppingReason, str]:
        """Compare a value with the thresholds and the best so far, and keep it if it is the best."""
        name, is_better = self.monitor, self._metric.is_better
        worse_sign, better_sign = (">", "<") if self.mode == "min" else ("<", ">")
        if self.check_finite and not math.isfinite(value):
            return (
                EarlyStoppingReason.NON_FINITE_METRIC,
                f"Stopping: {name}={value} is not finite (best: {self._best:.6g}).",
            )
        limit = self.stopping_threshold
        if limit is not None and is_better(value, limit):
            return (
                EarlyStoppingReason.STOPPING_THRESHOLD,
                f"Stopping threshold reached: {name}={value:.6g} {better_sign} {limit}.",
            )
        limit = self.divergence_threshold
        if limit is not None and is_better(limit, value):
            return (
                EarlyStoppingReason.DIVERGENCE_THRESHOLD,
                f"Divergence threshold reached: {name}={value:.6g} {worse_sign} {limit}.",
            )
        needed = self._best - self.min_delta if self.mode == "min" else self._best + self.min_delta
        if is_better(value, needed):
            message = f"{name} improved from {self._best:.6g} to {value:.6g}."
            self._best, self.wait_count = value, 0
            return EarlyStoppingReason.NOT_STOPPED, message
        self.wait_count += 1
        if self.wait_count < self.patience:
            return EarlyStoppingReason.NOT_STOPPED, ""
        return (
            EarlyStoppingReason.PATIENCE_EXHAUSTED,
            f"Stopping: {name} did not improve on {self._best:.6g} in {self.wait_count} checks.",
        )
