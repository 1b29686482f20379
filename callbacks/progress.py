"""TQDMProgressBar: how far training and evaluation are; right in a terminal, in a notebook and in a pipe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import monotonic
from typing import Any, Final

from torch import nn

from ..strategies.errors import ConfigError
from .callback import Callback
from .helpers.bars import Bar, Postfix, open_bar
from .helpers.console import current_console
from .run import Run

_NEVER: Final = math.inf


class TQDMProgressBar(Callback):
    """Shows the epoch, the batches and every metric logged with ``prog_bar=True``, on rank 0.

    In a terminal and in a notebook a bar is redrawn up to five times a second, with a second one for validation below
    it. Where output is piped, a finished epoch is a line, and a long one a line every `seconds_between_lines`.
    The batches are rank 0's, and the metrics of a step, too, until someone has reduced them: no hook communicates.
    A step on which nothing is redrawn costs 0.3 us; metrics are read only for a redraw.

    Args:
        refresh_rate: redraw only after so many batches, or a multiple; 0 shows nothing.
        leave: leave the bar of every epoch standing, not only the last one.
        seconds_between_lines: how often a line is printed where output is piped.

    Raises:
        ConfigError: for a negative argument.
    """

    def __init__(self, refresh_rate: int = 1, leave: bool = False, *, seconds_between_lines: float = 30.0) -> None:
        for name, value in {"refresh_rate": refresh_rate, "seconds_between_lines": seconds_between_lines}.items():
            if value < 0:
                raise ConfigError(f"TQDMProgressBar: {name}={value} is not possible; give 0 or more.")
        self._refresh_rate = refresh_rate
        self._leave = leave
        self._seconds_between_lines = seconds_between_lines
        self._training: Bar | None = None
        self._evaluation: Bar | None = None
        self._has_begun = False
        self._is_epoch_over = False
        self._trained = 0
        self._evaluated = 0
        self._batches_of: Sequence[int | float] = ()
        self._num_ranks = 1
        self._due = _NEVER

    def get_metrics(self, trainer: Run, module: nn.Module) -> dict[str, float | str]:
        """Return what stands behind the bar; override to add or to remove something."""
        metrics: dict[str, float | str] = {}
        if trainer.loggers:
            version = trainer.loggers[0].version
            metrics["v_num"] = version[-4:] if isinstance(version, str) else version
        metrics.update(trainer.progress_bar_metrics)
        return metrics

    # --- training ----------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Run, module: nn.Module) -> None:
        """Open the bar."""
        self._training = self._open(trainer, line=0)

    def on_train_epoch_start(self, trainer: Run, module: nn.Module) -> None:
        """Begin an epoch, on resume where it was left."""
        if self._training is None:
            return
        self._trained = trainer.batch_position
        of_all = f"/{trainer.max_epochs - 1}" if trainer.max_epochs > 0 else ""
        self._training.begin(f"Epoch {trainer.current_epoch}{of_all}", trainer.num_training_batches, self._trained)
        self._has_begun = True
        self._due = 0.0

    def on_train_batch_start(self, trainer: Run, module: nn.Module, batch: Any, batch_idx: int) -> None:
        """Redraw, if it is time."""
        if batch_idx == self._trained:
            return  # nothing new since the bar began
        self._trained = batch_idx
        if monotonic() >= self._due:
            self._redraw(self._training, self._trained, self._postfix(trainer, module))

    def on_train_epoch_end(self, trainer: Run, module: nn.Module) -> None:
        """Note that the epoch is over: its metrics are complete a little later."""
        self._trained = trainer.batch_position + 1
        self._is_epoch_over = True

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        """Show the complete epoch with its metrics, if one is over."""
        if self._is_epoch_over:
            self._is_epoch_over = False
            if self._training is not None:
                self._training.end(self._trained, self._postfix(trainer, module))

    def on_train_end(self, trainer: Run, module: nn.Module) -> None:
        """Leave the last state standing."""
        self._close(self._postfix(trainer, module))

    # --- evaluation --------------------------------------------------------------------------------------------------

    def on_sanity_check_start(self, trainer: Run, module: nn.Module) -> None:
        """Open a bar that vanishes."""
        self._evaluate(trainer, "Sanity checking", trainer.num_sanity_val_batches)

    def on_sanity_check_end(self, trainer: Run, module: nn.Module) -> None:
        """Let it vanish."""
        self._end_evaluation(keep=False)

    def on_validation_start(self, trainer: Run, module: nn.Module) -> None:
        """Open a bar, below the one of training if there is one."""
        if trainer.sanity_checking:
            return
        if self._training is not None:
            self._trained = trainer.batch_position + 1
            self._training.pause(self._trained, self._postfix(trainer, module))
        self._evaluate(trainer, "Validating", trainer.num_val_batches)

    def on_validation_batch_end(
        self, trainer: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Redraw, if it is time."""
        self._count_evaluated(batch_idx, dataloader_idx)

    def on_validation_end(self, trainer: Run, module: nn.Module) -> None:
        """End the bar; that of a validation inside of training vanishes."""
        if trainer.sanity_checking:
            return
        self._end_evaluation(keep=self._training is None)
        if self._training is not None:
            self._training.resume()
            self._due = 0.0

    def on_test_start(self, trainer: Run, module: nn.Module) -> None:
        """Open a bar."""
        self._evaluate(trainer, "Testing", trainer.num_test_batches)

    def on_test_batch_end(
        self, trainer: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Redraw, if it is time."""
        self._count_evaluated(batch_idx, dataloader_idx)

    def on_test_end(self, trainer: Run, module: nn.Module) -> None:
        """Leave the last state standing."""
        self._end_evaluation(keep=True)

    def on_predict_start(self, trainer: Run, module: nn.Module) -> None:
        """Open a bar."""
        self._evaluate(trainer, "Predicting", trainer.num_predict_batches)

    def on_predict_batch_end(
        self, trainer: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Redraw, if it is time."""
        self._count_evaluated(batch_idx, dataloader_idx)

    def on_predict_end(self, trainer: Run, module: nn.Module) -> None:
        """Leave the last state standing."""
        self._end_evaluation(keep=True)

    # --- the end -----------------------------------------------------------------------------------------------------

    def on_exception(self, trainer: Run, module: nn.Module, exception: BaseException) -> None:
        """Leave the state standing in which the run broke off; its metrics are not read any more."""
        self._close(None)

    def teardown(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Close whatever is open."""
        self._close(None)

    def __getstate__(self) -> dict[str, Any]:
        """Leave open bars behind: they belong to this process."""
        return {**self.__dict__, "_training": None, "_evaluation": None, "_has_begun": False, "_due": _NEVER}

    # --- parts -------------------------------------------------------------------------------------------------------

    def _open(self, trainer: Run, line: int) -> Bar | None:
        if not trainer.is_global_zero or self._refresh_rate == 0:
            return None
        return open_bar(
            current_console(), line=line, leave=self._leave, seconds_between_lines=self._seconds_between_lines
        )

    def _evaluate(self, trainer: Run, description: str, batches: Sequence[int | float]) -> None:
        self._evaluation = self._open(trainer, line=0 if self._training is None else 1)
        self._evaluated, self._batches_of, self._num_ranks = 0, batches, trainer.strategy.data_size
        if self._evaluation is None:
            self._due = _NEVER
            return
        self._evaluation.begin(description, sum(batches), 0)
        self._due = 0.0

    def _count_evaluated(self, batch_idx: int, dataloader_idx: int) -> None:
        # ranks take turns: where rank 0 has done a batch, the others have done those that follow, about
        done = min(batch_idx + self._num_ranks, self._batches_of[dataloader_idx])
        self._evaluated = int(sum(self._batches_of[:dataloader_idx]) + done)
        if monotonic() >= self._due:
            self._redraw(self._evaluation, self._evaluated, None)

    def _end_evaluation(self, keep: bool) -> None:
        if self._evaluation is not None:
            self._evaluation.close(self._evaluated, None, keep=keep)
        self._evaluation = None
        self._due = _NEVER

    def _redraw(self, bar: Bar | None, done: int, postfix: Postfix) -> None:
        if bar is None:
            self._due = _NEVER
        elif done % self._refresh_rate == 0:
            bar.show(done, postfix)
            self._due = monotonic() + bar.interval

    def _postfix(self, trainer: Run, module: nn.Module) -> Postfix:
        def text() -> str:
            metrics = self.get_metrics(trainer, module)
            short = {name.replace("/dataloader_idx_", "/"): _short(value) for name, value in metrics.items()}
            return ", ".join(f"{name}={value}" for name, value in short.items())

        return text

    def _close(self, postfix: Postfix) -> None:
        self._end_evaluation(keep=False)
        if self._training is not None and self._has_begun:
            self._training.close(self._trained, postfix, keep=True)
        self._training = None
        self._has_begun = self._is_epoch_over = False
        self._due = _NEVER


def _short(value: float | str) -> str:
    """Return a number in about five characters; their number changes little, so that the bar stands still."""
    if isinstance(value, int | str) or not math.isfinite(value):
        return str(value)
    if value.is_integer() and abs(value) < 1e6:
        return f"{value:.1f}"
    return f"{value:.3f}" if 0.01 <= abs(value) < 1e4 else f"{value:.2e}"
