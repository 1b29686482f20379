"""MonitoredMetric: a metric that callbacks base decisions on, read at the step at which it was computed."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from typing import Final, Literal

from ...common.errors import ConfigError
from ..run import Run

Mode = Literal["min", "max"]
_MODES: Final = ("min", "max")


class MonitoredMetric:
    """A metric that a callback bases decisions on, whether a step, a validation or the end of an epoch computes it.

    A value counts only at the `global_step` at which it was computed: a decision that is due earlier is pending until
    then. Every rank gets rank 0's value, so that all decide the same. That is a collective, so a pending decision asks
    again only after an epoch or a validation, and at every step only if steps log the metric.

    Args:
        owner: the name of the callback in errors.
        monitor: the name under which the metric is logged.
        mode: whether ``min`` or ``max`` is better.

    Raises:
        ConfigError: for an unknown mode.
    """

    def __init__(self, owner: str, monitor: str, mode: Mode) -> None:
        check_mode(owner, mode)
        self._owner, self._monitor = owner, monitor
        self._sign = 1.0 if mode == "max" else -1.0
        self.is_pending = False
        """Whether a decision waits for a new value; an attribute, since it is read at every step."""
        self._validated_at: int | None = None
        self._epoch_ended_at: int | None = None
        self._is_of_steps = True
        self._has_warned = False

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def start(self, *, is_pending: bool = False) -> None:
        """Reset when training starts; a resumed run may have a decision pending."""
        self.is_pending = is_pending
        self._validated_at = self._epoch_ended_at = None
        self._is_of_steps = True

    def note_validation(self, step: int) -> None:
        """Note that a validation has run after a step: its metrics can be read from now on."""
        self._validated_at = step

    def note_epoch(self, step: int) -> None:
        """Note that an epoch has ended with a step: its metrics can be read from now on."""
        self._epoch_ended_at = step

    def is_worth_asking(self, trainer: Run) -> bool:
        """Return whether a value may now be available for a pending decision; the same on every rank."""
        return self.is_pending and (
            self._is_of_steps or trainer.global_step in (self._validated_at, self._epoch_ended_at)
        )

    def read(self, trainer: Run, *, strict: bool = True) -> float | None:
        """Return rank 0's value; None if it is not from this step, and the decision is then pending. Collective.

        Raises:
            ConfigError: if `strict`, and the metric was never logged although an epoch and a validation have passed.
        """
        trainer.reduce_metrics()
        step, computed_at = trainer.global_step, trainer.metric_step(self._monitor)
        value = float(trainer.callback_metrics[self._monitor]) if computed_at == step else None
        of_rank_0: tuple[int | None, float | None] = trainer.strategy.ranks.all.broadcast((computed_at, value))
        computed_at, value = of_rank_0
        self.is_pending = computed_at != step
        # a metric that was last computed when neither a validation nor an epoch ended may come at any step
        is_of_steps = computed_at not in (None, self._validated_at, self._epoch_ended_at)
        self._is_of_steps = is_of_steps or trainer.strategy.world_size == 1
        if not self.is_pending:
            return value
        if strict and computed_at is None and self._is_overdue(trainer):
            raise ConfigError(
                f"{self._owner}(monitor={self._monitor!r}): nothing was logged under this name; "
                f"{describe_logged(trainer.callback_metrics, self._monitor)}{self._without_validation(trainer)}"
            )
        return None

    def warn_if_nan(self, trainer: Run, value: float | None) -> None:
        """Warn once that the metric is NaN."""
        if value is None or not math.isnan(value) or self._has_warned or not trainer.is_global_zero:
            return
        self._has_warned = True
        warnings.warn(
            f"{self._owner}(monitor={self._monitor!r}) got nan at global_step {trainer.global_step}, which counts as "
            "the worst value; check what is logged, or add NaNGuard() to the callbacks to stop at the first loss that "
            "is not finite.",
            stacklevel=2,
        )

    def _is_overdue(self, trainer: Run) -> bool:
        has_validated = self._validated_at is not None or not sum(trainer.num_val_batches)
        return self._epoch_ended_at is not None and has_validated

    @staticmethod
    def _without_validation(trainer: Run) -> str:
        if sum(trainer.num_val_batches):
            return ""
        return " This fit validates nothing: it has no validation data, or limit_val_batches=0 or overfit_batches."

    def rank_of(self, value: float) -> tuple[bool, float]:
        """Return a sort key that is larger for better values; a value that is not finite is the worst."""
        return (True, self._sign * value) if math.isfinite(value) else (False, 0.0)

    def is_better(self, value: float, than: float) -> bool:
        """Return whether a value is strictly better than another."""
        return self.rank_of(value) > self.rank_of(than)


_LARGER_IS_BETTER: Final = frozenset(
    ["acc", "accuracy", "auc", "auroc", "auprc", "f1", "iou", "miou", "map", "precision", "recall", "psnr", "ssim"]
)
"""Words in the names of metrics of which larger values are better."""


def chosen_mode(owner: str, monitor: str | None, mode: Mode | None) -> Mode:
    """Return the mode, by default ``min``; warn if it was not given, and the metric's name asks for ``max``.

    Raises:
        ConfigError: for an unknown mode.
    """
    if mode is not None:
        check_mode(owner, mode)
        return mode
    words = set(re.split(r"[^a-z0-9]+", (monitor or "").lower()))
    if words & _LARGER_IS_BETTER and not words & {"loss", "error", "err"}:
        warnings.warn(
            f"{owner}(monitor={monitor!r}) takes the smallest value for the best, as mode='min' is the default; set "
            "mode='max', or mode='min' to say that it is meant.",
            stacklevel=4,
        )
    return "min"


def check_mode(owner: str, mode: str) -> None:
    """Raise `ConfigError` unless `mode` is ``min`` or ``max``."""
    if mode not in _MODES:
        raise ConfigError(f"{owner}: `mode` can be 'min' or 'max', but got {mode}; choose one.")


def describe_logged(metrics: Mapping[str, object], wanted: str) -> str:
    """Return what was logged, and the remedy, for the error about a metric that was not logged."""
    if not metrics:
        return f"nothing was logged at all: call self.log({wanted!r}, value) in a step of the module."
    names = ", ".join(repr(name) for name in sorted(metrics))
    return f"{names} were logged: monitor one of them, or call self.log({wanted!r}, value)."
