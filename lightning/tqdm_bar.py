"""KeptProgressBar: Echelon's `TQDMProgressBar`, with what libraries read from Lightning's after a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import tqdm.auto

from ..callbacks.helpers.bars import Bar, LineBar, Postfix, TqdmBar
from ..callbacks.progress import TQDMProgressBar as ProgressBarOfEchelon
from ..callbacks.progress_display import Kind
from ..callbacks.run import Run
from ..common.console import Console
from .extras.utilities import known_as
from .parts import ProgressBar

_WIDTH: Final = 5

_NAMES: Final[Mapping[Kind, str]] = {
    "train": "train_progress_bar",
    "sanity_check": "val_progress_bar",
    "validate": "val_progress_bar",
    "test": "test_progress_bar",
    "predict": "predict_progress_bar",
}
"""The attribute with the bar of each kind."""


class Tqdm(tqdm.auto.tqdm):  # type: ignore[type-arg]  # generic in its stubs alone
    """A ``tqdm`` bar whose numbers have a fixed width, so that what follows them does not move."""

    @staticmethod
    def format_num(n: float | str) -> str:
        """Return a number with 5 characters or more; a whole number and a text that is none stay as they are."""
        text = n if isinstance(n, str) else str(tqdm.auto.tqdm.format_num(n))
        if isinstance(n, int) or "e" in text:
            return text
        if "." not in text and len(text) < _WIDTH:
            if not text.lstrip("-").isdigit():
                return text
            text += "."
        return text.ljust(_WIDTH, "0")


def convert_inf(x: float | str | None) -> float | str | None:
    """Return a total as tqdm takes it: None if it is infinite."""
    return None if x is None or math.isinf(float(x)) else x


@known_as("TQDMProgressBar")
class KeptProgressBar(ProgressBarOfEchelon):
    """Show the epoch, the batches and metrics; its bars can be read after they were shown.

    Args:
        refresh_rate: redraw only when the number of batches is a multiple of it; 0 shows nothing.
        process_position: the lines above the bar that are left to other bars.
        leave: leave the bar of every epoch.
    """

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        super().__init__(refresh_rate, leave)
        self._trainer: Run | None = None
        self._current_eval_dataloader_idx: int | None = None
        self._process_position = process_position
        self._shown: dict[str, object] = {}

    BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"
    sanity_check_description = ProgressBar.sanity_check_description
    train_description = ProgressBar.train_description
    validation_description = ProgressBar.validation_description
    test_description = ProgressBar.test_description
    predict_description = ProgressBar.predict_description
    trainer = ProgressBar.trainer
    setup = ProgressBar.setup
    has_dataloader_changed = ProgressBar.has_dataloader_changed
    total_train_batches = ProgressBar.total_train_batches
    total_val_batches = ProgressBar.total_val_batches
    total_val_batches_current_dataloader = ProgressBar.total_val_batches_current_dataloader
    total_test_batches_current_dataloader = ProgressBar.total_test_batches_current_dataloader
    total_predict_batches_current_dataloader = ProgressBar.total_predict_batches_current_dataloader

    @property
    def process_position(self) -> int:
        """The lines above the bar that are left to other bars."""
        return self._process_position

    def print(self, *values: Any, sep: str = " ", **options: Any) -> None:
        """Print above the bar; without a bar, as Python's ``print``."""
        bar = next((bar for bar in (self._training, self._evaluation) if isinstance(bar, TqdmBar) and bar.tqdm), None)
        if isinstance(bar, TqdmBar) and bar.tqdm is not None:
            bar.tqdm.write(sep.join(map(str, values)), **options)
        elif not self.is_disabled:
            print(*values, sep=sep, **options)  # noqa: T201 - what it is for

    def _open(self, trainer: Run, kind: Kind) -> Bar | None:
        bar = super()._open(trainer, kind)
        is_silent = bar is None and trainer.is_global_zero and self.is_enabled
        if not (is_silent or isinstance(bar, LineBar)):
            return bar
        counted = CountedLines(self._seconds_between_lines, is_silent=is_silent)
        self._shown[_NAMES[kind]] = counted.tqdm
        return counted

    def _make_bar(self, console: Console, kind: Kind) -> Bar:
        name = {"train": "train", "sanity_check": "sanity", "validate": "validation"}.get(kind, kind)
        init: Callable[[], Any] = getattr(self, f"init_{name}_tqdm")

        def make() -> Any:
            bar = self._shown[_NAMES[kind]] = init()
            if self._process_position:
                bar.pos -= self._process_position  # tqdm counts lines downwards
            return bar

        return TqdmBar(make, self._stays(console))

    def _drawn(self, name: str, bar: Bar | None) -> object:
        is_shown = isinstance(bar, TqdmBar) and bar.tqdm is not None
        return super()._drawn(name, bar) if is_shown or name not in self._shown else self._shown[name]

    def __getstate__(self) -> dict[str, object]:
        """Leave out the bars and the trainer: they belong to this process."""
        return {**super().__getstate__(), "_shown": {}, "_trainer": None}


class CountedLines(LineBar):
    """Lines of piped output, and beside them a ``tqdm`` bar that draws nothing and has their count.

    Args:
        interval: the seconds between two lines.
        is_silent: whether there are no lines either.
    """

    def __init__(self, interval: float, *, is_silent: bool) -> None:
        super().__init__(interval)
        self.tqdm, self._is_silent = tqdm.auto.tqdm(disable=True), is_silent

    def begin(self, description: str, total: float, done: int) -> None:
        self.tqdm.desc, self.tqdm.n, self.tqdm.total = description, done, None if math.isinf(total) else int(total)
        super().begin(description, total, done)

    def show(self, done: int, postfix: Postfix) -> None:
        self.tqdm.n = done
        super().show(done, postfix)

    def pause(self, done: int, postfix: Postfix) -> None:
        self.tqdm.n = done
        super().pause(done, postfix)

    def end(self, done: int, postfix: Postfix) -> None:
        self.tqdm.n = done
        super().end(done, postfix)

    def close(self, done: int, postfix: Postfix, *, keep: bool) -> None:
        self.tqdm.n = done
        super().close(done, postfix, keep=keep)

    def _print(self, done: int, postfix: Postfix) -> None:
        if not self._is_silent:
            super()._print(done, postfix)
