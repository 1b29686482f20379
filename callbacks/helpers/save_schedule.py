"""SaveSchedule: the steps, times or epochs at which a checkpoint is due."""

from __future__ import annotations

import math
import time
from datetime import timedelta

from ...common.durations import parse_amount
from ...common.errors import ConfigError
from ..run import Run


class SaveSchedule:
    """One of three schedules: every n steps, after each time interval, or every n epochs (the default, with 1).

    Args:
        every_n_train_steps: 0 or None for never.
        train_time_interval: measured on rank 0, or samples or tokens, such as ``"10M tokens"``; None for never.
        every_n_epochs: 0 or None for never.
        at_epoch_end: save an epoch at its end; False: after each of its validations; None: after each validation if the
            run has any, else at the end.

    Raises:
        ConfigError: for a count below 0, or for more than one schedule.
    """

    def __init__(
        self,
        every_n_train_steps: int | None,
        train_time_interval: timedelta | str | None,
        every_n_epochs: int | None,
        at_epoch_end: bool | None,
    ) -> None:
        given = {
            "every_n_train_steps": every_n_train_steps,
            "train_time_interval": train_time_interval,
            "every_n_epochs": every_n_epochs,
        }
        for name in ("every_n_train_steps", "every_n_epochs"):
            if (count := given[name]) is not None and (not isinstance(count, int) or count < 0):
                raise ConfigError(f"{name}={count!r} is not an interval. Must be >= 0: a number, or 0 for never.")
        if sum(bool(value) or isinstance(value, timedelta) for value in given.values()) > 1:
            values = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
            raise ConfigError(f"Combination of parameters {values} is not possible; give each its own ModelCheckpoint.")
        self.is_default = all(value is None for value in given.values())
        """Whether no schedule was chosen."""
        if self.is_default:
            every_n_epochs = 1
        self.every_n_steps, self.every_n_epochs = every_n_train_steps or 0, every_n_epochs or 0
        self.interval = train_time_interval
        self.amount = parse_amount("train_time_interval", train_time_interval)
        if isinstance(train_time_interval, str) and self.amount is None:
            raise ConfigError(
                f"train_time_interval must be a timedelta, or samples or tokens such as '10M tokens', got "
                f"{train_time_interval!r}; give one of them."
            )
        self.counts_tokens = self.amount is not None and self.amount.unit == "tokens"
        """Whether it needs the number of tokens that were seen."""
        self._seen = 0
        self.is_by_step = bool(self.every_n_steps) or self.interval is not None
        """Whether to ask `is_step_due` after each step; an attribute, since it is read there."""
        self._at_epoch_end = at_epoch_end
        self._clock = IntervalClock(train_time_interval if isinstance(train_time_interval, timedelta) else None)

    @property
    def arguments(self) -> str:
        """The schedule as the arguments of a call."""
        steps, epochs = self.every_n_steps, self.every_n_epochs
        return f"every_n_train_steps={steps}, train_time_interval={self.interval}, every_n_epochs={epochs}"

    def start(self, trainer: Run) -> None:
        """Start measuring time and amounts, when training starts."""
        self._clock.start(trainer.global_step)
        self._seen = self._amount_seen(trainer)

    def _amount_seen(self, trainer: Run) -> int:
        return trainer.tokens_seen if self.counts_tokens else trainer.samples_seen

    def is_step_due(self, trainer: Run) -> bool:
        """Return whether a checkpoint is due after this step, by its number or rank 0's clock. Collective."""
        if self.every_n_steps:
            return trainer.global_step % self.every_n_steps == 0
        if self.amount is not None:
            before, self._seen = self._seen, self._amount_seen(trainer)
            return self.amount.is_reached(before, self._seen)
        return self._clock.is_over(trainer)

    def is_epoch_due(self, epoch: int) -> bool:
        """Return whether a checkpoint is due in this epoch."""
        return self.every_n_epochs > 0 and (epoch + 1) % self.every_n_epochs == 0

    def is_validation_due(self, epoch: int) -> bool:
        """Return whether a checkpoint is due after a validation in this epoch."""
        return not self._at_epoch_end and self.is_epoch_due(epoch)

    def is_at_epoch_end(self, trainer: Run) -> bool:
        """Return whether the checkpoint of an epoch is due at its end."""
        return self._at_epoch_end or (self._at_epoch_end is None and not sum(trainer.num_val_batches))


class IntervalClock:
    """Rank 0's clock, which tells all ranks whether an interval has passed, without communicating at every step."""

    def __init__(self, interval: timedelta | None) -> None:
        self._seconds = interval.total_seconds() if interval is not None else math.inf
        self.start(0)

    def start(self, step: int) -> None:
        """Begin an interval."""
        self._began, self._began_at, self._next_look = time.monotonic(), step, step

    def is_over(self, trainer: Run) -> bool:
        """Return whether the interval has passed on rank 0, and begin another if so.

        Collective at the steps at which it checks the clock, the same on every rank: after half of the steps that would
        fill the rest of the interval at the pace so far.
        """
        step = trainer.global_step
        if step < self._next_look:
            return False
        passed = time.monotonic() - self._began
        pace = max(passed / max(step - self._began_at, 1), 1e-9)
        wait = max(1, int((self._seconds - passed) / pace / 2))
        is_over: bool
        is_over, self._next_look = trainer.strategy.ranks.all.broadcast((passed >= self._seconds, step + wait))
        if is_over:
            self.start(step)
        return is_over
