"""TQDMProgressBar: a progress bar for terminals and notebooks, and a few lines if output is piped."""

from __future__ import annotations

from typing import Any

from ..common.console import Console, current_console
from ..common.errors import RunError
from .helpers.bars import Bar, TqdmBar, new_tqdm
from .progress_display import DESCRIPTIONS, Kind, ProgressDisplay


class TQDMProgressBar(ProgressDisplay):
    """Show the epoch, the batches and every metric logged with ``prog_bar=True``, on rank 0.

    In a terminal and in a notebook, a bar is redrawn up to five times a second, with a second bar for validation below
    it. In a terminal, each epoch leaves its line, and a bar that is too wide gives up all else before its metrics.
    Override the ``init_*_tqdm`` methods to change their look. If output is piped, each epoch prints a line, and a long
    one prints a line every `seconds_between_lines`. Batches are counted on rank 0, and the metrics of a step are
    rank 0's until they are reduced: no hook communicates. A step without a redraw costs 0.3 us; metrics are read only
    for a redraw.

    Args:
        refresh_rate: redraw only when the number of batches is a multiple of it; 0 shows nothing.
        leave: leave the bar of every epoch; by default, in a terminal, from the tenth on at most one per second.
        seconds_between_lines: the time between two lines if output is piped.

    Raises:
        ConfigError: for a negative argument.

    Example::

        Trainer(max_epochs=1, callbacks=TQDMProgressBar(refresh_rate=10)).fit(module, train_loader)
    """

    def _make_bar(self, console: Console, kind: Kind) -> Bar:
        name = {"train": "train", "sanity_check": "sanity", "validate": "validation"}.get(kind, kind)
        return TqdmBar(getattr(self, f"init_{name}_tqdm"), self._stays(console))

    def init_train_tqdm(self) -> Any:
        """Return a new ``tqdm`` bar for training; override this or a method below to change its look."""
        return new_tqdm(current_console(), DESCRIPTIONS["train"], line=0)

    def init_sanity_tqdm(self) -> Any:
        """Return a new bar for the sanity check."""
        return self._tqdm_below_training("sanity_check")

    def init_validation_tqdm(self) -> Any:
        """Return a new bar for a validation."""
        return self._tqdm_below_training("validate")

    def init_test_tqdm(self) -> Any:
        """Return a new bar for a test."""
        return self._tqdm_below_training("test")

    def init_predict_tqdm(self) -> Any:
        """Return a new bar for predictions."""
        return self._tqdm_below_training("predict")

    @property
    def train_progress_bar(self) -> Any:
        """The ``tqdm`` bar of training.

        Raises:
            RunError: if none is drawn; the same goes for the bars below.
        """
        return self._drawn("train_progress_bar", self._training)

    @property
    def val_progress_bar(self) -> Any:
        """The bar of the validation or sanity check."""
        return self._drawn("val_progress_bar", self._evaluation)

    @property
    def test_progress_bar(self) -> Any:
        """The bar of the test."""
        return self._drawn("test_progress_bar", self._evaluation)

    @property
    def predict_progress_bar(self) -> Any:
        """The bar of the predictions."""
        return self._drawn("predict_progress_bar", self._evaluation)

    def _tqdm_below_training(self, kind: Kind) -> object:
        return new_tqdm(current_console(), DESCRIPTIONS[kind], line=0 if self._training is None else 1)

    def _drawn(self, name: str, bar: Bar | None) -> object:
        if not isinstance(bar, TqdmBar) or bar.tqdm is None:
            raise RunError(f"TQDMProgressBar.{name} is not shown, found {bar!r}; read it in a hook while it is shown.")
        return bar.tqdm
