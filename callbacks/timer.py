"""Timer: measure the time of each stage, including resumed runs, and end training when the time is up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta
from time import monotonic
from typing import Any, Final, Literal

from torch import nn

from ..common.console import say
from ..common.durations import parse_duration
from ..common.errors import ConfigError, did_you_mean
from .callback import Callback
from .run import Run

TimedStage = Literal["train", "sanity_check", "validate", "test", "predict"]
_STAGES: Final = ("train", "sanity_check", "validate", "test", "predict")
_INTERVALS: Final = ("step", "epoch")


class Timer(Callback):
    """Measure each stage, and set ``trainer.should_stop`` when training has lasted for `duration`.

    Training time includes the validations inside it, and the time before a resume. The hooks run on every rank, each
    with its own clock, and do not communicate: rank 0's clock ends training on all ranks, through `Run.should_stop`. A
    step costs 0.1 us.

    Args:
        duration: ``"DD:HH:MM:SS"``, a timedelta, or its arguments; None: only measure.
        interval: read the clock after every optimizer ``step`` or after every ``epoch``.
        verbose: print a line when the time is up.

    Raises:
        ConfigError: for an invalid duration or an unknown interval.

    Example::

        timer = Timer(duration="00:12:00:00")  # twelve hours
        Trainer(max_epochs=1, callbacks=timer).fit(module, train_loader)
        timer.time_elapsed("train")
    """

    def __init__(
        self,
        duration: str | timedelta | Mapping[str, int] | None = None,
        interval: Literal["step", "epoch"] = "step",
        verbose: bool = True,
    ) -> None:
        if interval not in _INTERVALS:
            known = did_you_mean(str(interval), _INTERVALS)
            raise ConfigError(
                f"Unsupported parameter value interval={interval!r}; it must be 'step' or 'epoch'.{known}"
            )
        parsed = parse_duration("duration", duration)
        self._duration = math.inf if parsed is None else parsed.total_seconds()
        self._interval = interval
        self._verbose = verbose
        self._starts: dict[str, float] = {}
        self._ends: dict[str, float] = {}
        self._before = 0.0
        self._seconds: dict[str, float] = {}
        self._deadline = math.inf

    def start_time(self, stage: TimedStage = "train") -> float | None:
        """Return the time at which a stage began, on the clock of ``time.monotonic``; None if it has not."""
        return self._starts.get(_check_stage(stage))

    def end_time(self, stage: TimedStage = "train") -> float | None:
        """Return the time at which a stage ended, on the same clock; None if it has not."""
        return self._ends.get(_check_stage(stage))

    def time_elapsed(self, stage: TimedStage = "train") -> float:
        """Return the seconds of a stage so far; for ``train``, including those before a resume."""
        before = self._before if _check_stage(stage) == "train" else 0.0
        if stage not in self._starts:
            return before or self._seconds.get(stage, 0.0)
        return before + self._ends.get(stage, monotonic()) - self._starts[stage]

    def time_remaining(self, stage: TimedStage = "train") -> float | None:
        """Return the remaining seconds of `duration` for a stage; None without a duration."""
        return None if math.isinf(self._duration) else self._duration - self.time_elapsed(stage)

    # --- hooks -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Forget the previous fit; `load_state_dict` follows if this one is resumed."""
        if stage == "fit":
            self._before, self._seconds = 0.0, {}
            self._starts.clear()
            self._ends.clear()

    def on_train_start(self, trainer: Run, module: nn.Module) -> None:
        """Start the clock; end training at once if a resumed run has no time left."""
        self._start("train")
        self._deadline = self._starts["train"] + self._duration - self._before
        self._stop_if_late(trainer)

    def on_train_end(self, trainer: Run, module: nn.Module) -> None:
        """Stop the clock."""
        self._end("train")

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        """Read the clock if it is read after every step."""
        if monotonic() >= self._deadline and self._interval == "step":
            self._stop_if_late(trainer)

    def on_train_epoch_end(self, trainer: Run, module: nn.Module) -> None:
        """Read the clock if it is read after every epoch."""
        if self._interval == "epoch":
            self._stop_if_late(trainer)

    def on_sanity_check_start(self, trainer: Run, module: nn.Module) -> None:
        """Start the clock of the sanity check."""
        self._start("sanity_check")

    def on_sanity_check_end(self, trainer: Run, module: nn.Module) -> None:
        """Stop the clock."""
        self._end("sanity_check")

    def on_validation_start(self, trainer: Run, module: nn.Module) -> None:
        """Start the clock of the validation; each validation is measured separately."""
        if not trainer.sanity_checking:
            self._start("validate")

    def on_validation_end(self, trainer: Run, module: nn.Module) -> None:
        """Stop the clock."""
        if not trainer.sanity_checking:
            self._end("validate")

    def on_test_start(self, trainer: Run, module: nn.Module) -> None:
        """Start the test's clock."""
        self._start("test")

    def on_test_end(self, trainer: Run, module: nn.Module) -> None:
        """Stop the clock."""
        self._end("test")

    def on_predict_start(self, trainer: Run, module: nn.Module) -> None:
        """Start the prediction's clock."""
        self._start("predict")

    def on_predict_end(self, trainer: Run, module: nn.Module) -> None:
        """Stop the clock."""
        self._end("predict")

    def on_exception(self, trainer: Run, module: nn.Module, exception: BaseException) -> None:
        """Stop every clock."""
        for stage in self._starts.keys() - self._ends.keys():
            self._end(stage)

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """Return the training time so far, and the last times of the other stages."""
        others = [stage for stage in {**self._seconds, **self._starts} if stage != "train"]
        return {
            "time_elapsed": self.time_elapsed("train"),
            "stages": {stage: self.time_elapsed(stage) for stage in others},  # type: ignore[arg-type]
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the saved training time; a rollback does not reset the time."""
        if "train" in self._starts and "train" not in self._ends:
            return
        self._before, self._seconds = float(state_dict["time_elapsed"]), dict(state_dict["stages"])
        self._starts.clear()
        self._ends.clear()

    # --- the clock ---------------------------------------------------------------------------------------------------

    def _start(self, stage: str) -> None:
        self._starts[stage] = monotonic()
        self._ends.pop(stage, None)

    def _end(self, stage: str) -> None:
        self._ends[stage] = monotonic()

    def _stop_if_late(self, trainer: Run) -> None:
        if monotonic() < self._deadline or not trainer.is_global_zero:
            return
        self._deadline = math.inf  # printed once: min_steps may let the run continue
        trainer.should_stop = True
        if self._verbose:
            elapsed = timedelta(seconds=int(self.time_elapsed("train")))
            say(f"Timer: Time limit reached. Training has lasted {elapsed} of {timedelta(seconds=self._duration)}.")


def _check_stage(stage: str) -> str:
    if stage not in _STAGES:
        raise ConfigError(f"stage must be one of {_STAGES}, got {stage!r}.{did_you_mean(str(stage), _STAGES)}")
    return stage
