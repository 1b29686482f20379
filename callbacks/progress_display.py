"""ProgressDisplay: the base of progress bars, which decides what they show and when."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any, Final, Literal, cast

from torch import nn

from ..common.console import Console, current_console, outlives_output_errors, say
from ..common.errors import ConfigError
from .callback import Callback
from .helpers.bars import Bar, FewLines, LineBar, Postfix, Stays
from .run import Recoverable, Run

_log = logging.getLogger(__name__)

Kind = Literal["train", "sanity_check", "validate", "test", "predict"]

DESCRIPTIONS: Final[Mapping[Kind, str]] = {
    "train": "Training",
    "sanity_check": "Sanity checking",
    "validate": "Validating",
    "test": "Testing",
    "predict": "Predicting",
}
"""The label of each kind of bar; during training, the epoch replaces it."""

_NEVER: Final = math.inf


class ProgressDisplay(Callback):
    """Base of progress bars: the epoch, the batches and every metric logged with ``prog_bar=True``, on rank 0.

    If output is piped, each epoch prints a line, and a long one prints a line every `seconds_between_lines`. Batches
    are counted on rank 0, and the metrics of a step are rank 0's until they are reduced: no hook communicates. Metrics
    are read only for a redraw. A subclass draws its bars in `_make_bar`.

    Args:
        refresh_rate: redraw only when the number of batches is a multiple of it; 0 shows nothing.
        leave: leave the bar of every epoch; by default, in a terminal, from the tenth on at most one per second.
        seconds_between_lines: the time between two lines if output is piped.

    Raises:
        ConfigError: for a negative argument.
    """

    def __init__(self, refresh_rate: int = 1, leave: bool = False, *, seconds_between_lines: float = 30.0) -> None:
        for name, value in {"refresh_rate": refresh_rate, "seconds_between_lines": seconds_between_lines}.items():
            if value < 0:
                raise ConfigError(f"{type(self).__name__}: {name} must be 0 or more, got {value}.")
        self._refresh_rate = refresh_rate
        self._leave = leave
        self._seconds_between_lines = seconds_between_lines
        self._is_enabled = True
        self._training: Bar | None = None
        self._evaluation: Bar | None = None
        self._has_begun = False
        self._is_epoch_over = False
        self._trained = 0
        self._evaluated = self._evaluated_before = self._dataloader_idx = 0
        self._batches_of: Sequence[int | float] = ()
        self._num_ranks = 1
        self._due = _NEVER

    def get_metrics(self, trainer: Run, module: nn.Module) -> dict[str, float | str]:
        """Return the numbers and texts shown behind the bar; override it to add or remove some."""
        metrics: dict[str, float | str] = dict(trainer.progress_bar_metrics)
        upload = cast(Recoverable, trainer).pending_upload
        if upload is not None:
            metrics["upload"] = f"({upload})"
        if trainer.loggers:
            version = trainer.loggers[0].version
            if version not in ("", None):  # last: a narrow terminal cuts the end off
                metrics.setdefault("v_num", version[-4:] if isinstance(version, str) else version)
        return metrics

    # --- what users change -------------------------------------------------------------------------------------------

    @property
    def refresh_rate(self) -> int:
        """The minimum number of batches between two redraws."""
        return self._refresh_rate

    @property
    def is_enabled(self) -> bool:
        """Whether the next bar will be shown."""
        return self._is_enabled and self._refresh_rate > 0

    @property
    def is_disabled(self) -> bool:
        """Whether the next bar will not be shown."""
        return not self.is_enabled

    def enable(self) -> None:
        """Show the bars from the next one on."""
        self._is_enabled = True

    def disable(self) -> None:
        """Show no bar from the next one on."""
        self._is_enabled = False

    @abstractmethod
    def _make_bar(self, console: Console, kind: Kind) -> Bar:
        """Return a new bar for batches of a kind; not called if output is piped."""

    # --- training ----------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Run, module: nn.Module) -> None:
        """Open the bar."""
        self._training = self._open(trainer, "train")

    def on_train_epoch_start(self, trainer: Run, module: nn.Module) -> None:
        """Start counting an epoch, from its current batch."""
        if self._training is None:
            return
        self._trained = trainer.batch_position
        of_all = f"/{trainer.max_epochs - 1}" if trainer.max_epochs > 0 else ""
        total = trainer.num_training_batches
        if math.isinf(total) and trainer.max_steps > 0:  # the steps that are left are all that is known
            total = self._trained + (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
        with self._drawing():
            self._training.begin(f"Epoch {trainer.current_epoch}{of_all}", total, self._trained)
        self._has_begun = self._training is not None
        self._due = 0.0

    def on_train_batch_start(self, trainer: Run, module: nn.Module, batch: Any, batch_idx: int) -> None:
        """Redraw if it is time."""
        if batch_idx == self._trained:
            return  # the bar has just started here
        self._trained = batch_idx
        if monotonic() >= self._due:
            self._redraw(self._training, self._trained, self._postfix(trainer, module))

    def on_train_epoch_end(self, trainer: Run, module: nn.Module) -> None:
        """Note that the epoch is over; its metrics are complete after this hook."""
        self._trained = trainer.batch_position + 1
        self._is_epoch_over = True

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        """Show the complete epoch with its metrics if it is over."""
        if self._is_epoch_over:
            self._is_epoch_over = False
            if self._training is not None:
                with self._drawing():
                    self._training.end(self._trained, self._postfix(trainer, module))

    def on_train_end(self, trainer: Run, module: nn.Module) -> None:
        """Leave the final state on the screen."""
        self._close(self._postfix(trainer, module))

    # --- evaluation --------------------------------------------------------------------------------------------------

    def on_sanity_check_start(self, trainer: Run, module: nn.Module) -> None:
        """Open a bar, which is removed at the end."""
        self._evaluate(trainer, "sanity_check", trainer.num_sanity_val_batches)

    def on_sanity_check_end(self, trainer: Run, module: nn.Module) -> None:
        """Remove the bar."""
        self._end_evaluation(keep=False)

    def on_validation_start(self, trainer: Run, module: nn.Module) -> None:
        """Open a bar, below the training bar if there is one."""
        if trainer.sanity_checking:
            return
        if self._training is not None:
            self._trained = trainer.batch_position + 1
            with self._drawing():
                self._training.pause(self._trained, self._postfix(trainer, module))
        self._evaluate(trainer, "validate", trainer.num_val_batches)

    def on_validation_batch_end(
        self, trainer: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Redraw if it is time."""
        self._count_evaluated(batch_idx, dataloader_idx)

    def on_validation_end(self, trainer: Run, module: nn.Module) -> None:
        """End the bar; remove it if the validation is inside training."""
        if trainer.sanity_checking:
            return
        self._end_evaluation(keep=self._training is None)
        if self._training is not None:
            self._training.resume()
            self._due = 0.0

    def on_test_start(self, trainer: Run, module: nn.Module) -> None:
        """Open a bar."""
        self._evaluate(trainer, "test", trainer.num_test_batches)

    def on_test_batch_end(
        self, trainer: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Redraw if it is time."""
        self._count_evaluated(batch_idx, dataloader_idx)

    def on_test_end(self, trainer: Run, module: nn.Module) -> None:
        """Leave the final state on the screen."""
        self._end_evaluation(keep=True)

    def on_predict_start(self, trainer: Run, module: nn.Module) -> None:
        """Open a bar."""
        self._evaluate(trainer, "predict", trainer.num_predict_batches)

    def on_predict_batch_end(
        self, trainer: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Redraw if it is time."""
        self._count_evaluated(batch_idx, dataloader_idx)

    def on_predict_end(self, trainer: Run, module: nn.Module) -> None:
        """Leave the final state on the screen."""
        self._end_evaluation(keep=True)

    # --- the end -----------------------------------------------------------------------------------------------------

    def on_exception(self, trainer: Run, module: nn.Module, exception: BaseException) -> None:
        """Leave the final state on the screen, without reading its metrics."""
        self._close(None)

    def teardown(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Close all open bars."""
        self._close(None)

    def __getstate__(self) -> dict[str, object]:
        """Leave out open bars: they belong to this process."""
        return {**self.__dict__, "_training": None, "_evaluation": None, "_has_begun": False, "_due": _NEVER}

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _open(self, trainer: Run, kind: Kind) -> Bar | None:
        if not trainer.is_global_zero or self.is_disabled:
            return None
        console, is_second = current_console(), self._training is not None
        if is_second and console in ("file", "plain_notebook"):
            return None  # the cursor cannot move
        return LineBar(self._seconds_between_lines) if console == "file" else self._make_bar(console, kind)

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Draw in the block; if standard output cannot be written, show nothing more, and train on."""
        is_drawn = False
        with outlives_output_errors():
            yield
            is_drawn = True
        if not is_drawn:
            for bar in (self._training, self._evaluation):
                if bar is not None:
                    bar.abandon()
            self._training = self._evaluation = None
            self._due = _NEVER

    def _stays(self, console: Console) -> Stays:
        """Return what decides whether an epoch that is over stays on the screen."""
        return (lambda: True) if self._leave else FewLines() if console == "terminal" else (lambda: False)

    def _evaluate(self, trainer: Run, kind: Kind, batches: Sequence[int | float]) -> None:
        self._evaluation = self._open(trainer, kind)
        self._evaluated = self._evaluated_before = self._dataloader_idx = 0
        self._batches_of, self._num_ranks = batches, trainer.strategy.data_size
        if self._evaluation is None:
            self._due = _NEVER
            return
        self._due = 0.0
        with self._drawing():
            self._evaluation.begin(DESCRIPTIONS[kind], sum(batches), 0)

    def _count_evaluated(self, batch_idx: int, dataloader_idx: int) -> None:
        if dataloader_idx != self._dataloader_idx:
            self._dataloader_idx, self._evaluated_before = dataloader_idx, self._evaluated
        # batches are dealt in turn: when rank 0 has done one, the other ranks have done about the next ones
        done = min(batch_idx + self._num_ranks, self._batches_of[dataloader_idx])
        self._evaluated = self._evaluated_before + int(done)
        if monotonic() >= self._due:
            self._redraw(self._evaluation, self._evaluated, None)

    def _end_evaluation(self, keep: bool) -> None:
        if self._evaluation is not None:
            with self._drawing():
                self._evaluation.close(self._evaluated, None, keep=keep)
        self._evaluation = None
        self._due = _NEVER

    def _redraw(self, bar: Bar | None, done: int, postfix: Postfix) -> None:
        if bar is None:
            self._due = _NEVER
        elif done % self._refresh_rate == 0:
            self._due = monotonic() + bar.interval
            with self._drawing():
                bar.show(done, postfix)

    def _postfix(self, trainer: Run, module: nn.Module) -> Postfix:
        def text() -> str:
            metrics = self.get_metrics(trainer, module)
            return self._text({name.replace("/dataloader_idx_", "/"): value for name, value in metrics.items()})

        return text

    def _text(self, metrics: Mapping[str, float | str]) -> str:
        """Return the text behind the count."""
        return ", ".join(f"{name}={_shorten_number(value)}" for name, value in metrics.items())

    def _close(self, postfix: Postfix) -> None:
        self._end_evaluation(keep=False)
        if self._training is not None and self._has_begun:
            with self._drawing():
                self._training.close(self._trained, postfix, keep=True)
        self._training = None
        self._has_begun = self._is_epoch_over = False
        self._due = _NEVER


def tell_beside_bar(callbacks: Iterable[object], line: str) -> None:
    """Print a line beside the bar that one of these callbacks shows; without a bar, only log it."""
    if any(isinstance(one, ProgressDisplay) and one.is_enabled for one in callbacks):
        say(line)
    else:
        _log.info("%s", line)


def _shorten_number(value: float | str) -> str:
    """Return a number in about five characters, so that the bar barely moves."""
    if isinstance(value, int | str) or not math.isfinite(value):
        return str(value)
    if value.is_integer() and abs(value) < 1e6:
        return f"{value:.1f}"
    return f"{value:.3f}" if 0.01 <= abs(value) < 1e4 else f"{value:.2e}"
