"""MonitoredMetric: the value of a metric at the moment at which it was computed, for callbacks that decide by it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, Literal

from ..strategies.errors import ConfigError
from .run import Run

Mode = Literal["min", "max"]
_MODES: Final = ("min", "max")


class MonitoredMetric:
    """A metric that a callback decides by, whether it is computed where training steps, validates or ends an epoch.

    A value counts only at the `global_step` at which it was computed: a decision that is due earlier waits for it.

    Args:
        owner: how the callback is called in errors.
        monitor: the name under which the metric is logged.
        mode: whether ``min`` or ``max`` is better.

    Raises:
        ConfigError: for another mode.
    """

    def __init__(self, owner: str, monitor: str, mode: Mode) -> None:
        check_mode(owner, mode)
        self._owner, self._monitor = owner, monitor
        self._sign = 1.0 if mode == "max" else -1.0
        self.is_pending = False
        """Whether a decision waits for a fresh value; an attribute, as it is asked at every step."""
        self._has_validated = False
        self._has_ended_epoch = False

    def start(self, *, is_pending: bool = False) -> None:
        """Forget what was noted; call it when training starts, with whether a resumed run had a decision pending."""
        self.is_pending = is_pending
        self._has_validated = self._has_ended_epoch = False

    def note_validation(self) -> None:
        """Remember that a validation has run: what it logs can be asked for from now on."""
        self._has_validated = True

    def note_epoch(self) -> None:
        """Remember that an epoch has ended: what it logs can be asked for from now on."""
        self._has_ended_epoch = True

    def read(self, trainer: Run, *, strict: bool = True) -> float | None:
        """Return rank 0's value, or None while it is not of this step; then the decision is pending. Collective.

        Raises:
            ConfigError: if `strict`, and the metric was never logged although an epoch and a validation have passed.
        """
        computed_at = trainer.metric_step(self._monitor)
        self.is_pending = computed_at != trainer.global_step
        if not self.is_pending:
            value: float = trainer.strategy.broadcast(float(trainer.callback_metrics[self._monitor]))
            return value
        if strict and computed_at is None and self._is_overdue(trainer):
            raise ConfigError(
                f"{self._owner}(monitor={self._monitor!r}): nothing was logged under this name; "
                f"{describe_logged(trainer.callback_metrics, self._monitor)}"
            )
        return None

    def _is_overdue(self, trainer: Run) -> bool:
        return self._has_ended_epoch and (self._has_validated or not sum(trainer.num_val_batches))

    def rank_of(self, value: float) -> tuple[bool, float]:
        """Return a key by which the better of two values is the larger; a value that is not finite is worst."""
        return (True, self._sign * value) if math.isfinite(value) else (False, 0.0)

    def is_better(self, value: float, than: float) -> bool:
        """Return whether a value is strictly better than another."""
        return self.rank_of(value) > self.rank_of(than)


def check_mode(owner: str, mode: str) -> None:
    """Raise `ConfigError` unless `mode` is one of the two."""
    if mode not in _MODES:
        raise ConfigError(f"{owner}(mode={mode!r}) is not possible; give mode='min' or mode='max'.")


def describe_logged(metrics: Mapping[str, object], wanted: str) -> str:
    """Return what was logged, for the error about a metric that was not."""
    if not metrics:
        return f"nothing was logged at all: call self.log({wanted!r}, value) in a step of the module."
    names = ", ".join(repr(name) for name in sorted(metrics))
    return f"logged were {names}: monitor one of them, or call self.log({wanted!r}, value)."
