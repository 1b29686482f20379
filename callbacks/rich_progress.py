"""RichProgressBar: a progress bar drawn with rich."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from time import monotonic
from typing import Any, Final

from ..common.console import Console
from ..common.errors import MissingDependencyError
from .helpers.bars import Bar, LineBar, Postfix, Stays
from .progress_display import Kind, ProgressDisplay
from .run import Run

_NARROWEST_BAR: Final = 4


@dataclass(frozen=True)
class RichProgressBarTheme:
    """Styles of a `RichProgressBar`, in rich's terms: ``"bold green"``, ``"#6206E0"``, or a ``rich.style.Style``."""

    description: Any = ""
    """Style of the epoch or stage."""
    progress_bar: Any = "#6206E0"
    progress_bar_finished: Any = "#6206E0"
    progress_bar_pulse: Any = "#6206E0"
    """Style of a bar whose end is unknown."""
    batch_progress: Any = ""
    """Style of the number of batches done."""
    time: Any = "dim"
    """Style of the elapsed and the remaining time."""
    processing_speed: Any = "dim underline"
    metrics: Any = "italic"
    metrics_text_delimiter: str = " "
    """The text between two metrics."""
    metrics_format: str = ".3f"
    """The format of their values."""


class RichProgressBar(ProgressDisplay):
    """Show what `TQDMProgressBar` shows, in colors and aligned columns; needs rich (``pip install echelon[rich]``).

    In a terminal, each epoch leaves its line. One that is too narrow for the metrics does not show the times, then not
    the speed, and then cuts the metrics off. If output is piped, and in a notebook without ipywidgets,
    each epoch prints a line.

    Args:
        refresh_rate: redraw only when the number of batches is a multiple of it; 0 shows nothing.
        leave: leave the bar of every epoch; by default, in a terminal, from the tenth on at most one per second.
        theme: the styles.
        console_kwargs: arguments of ``rich.console.Console``, such as ``width``.
        seconds_between_lines: the time between two lines if output is piped.

    Raises:
        ConfigError: for a negative argument.
        MissingDependencyError: if rich is not installed.

    Example::

        Trainer(max_epochs=1, callbacks=RichProgressBar(leave=True)).fit(module, train_loader)
    """

    def __init__(
        self,
        refresh_rate: int = 1,
        leave: bool = False,
        theme: RichProgressBarTheme | None = None,
        console_kwargs: Mapping[str, Any] | None = None,
        *,
        seconds_between_lines: float = 30.0,
    ) -> None:
        try:
            importlib.import_module("rich")
        except ImportError as error:
            raise MissingDependencyError(
                f"RichProgressBar needs rich, which is not installed ({error}); run: pip install rich, or use "
                "TQDMProgressBar()."
            ) from error
        super().__init__(refresh_rate, leave, seconds_between_lines=seconds_between_lines)
        self.theme = theme or RichProgressBarTheme()
        self._console_kwargs = dict(console_kwargs or {})
        self._screen: RichScreen | None = None
        self._run: Run | None = None

    def configure_columns(self, trainer: Run) -> list[Any]:
        """Return the columns, of ``rich.progress``; override it to change them. It is called when the bars open."""
        return list(columns_of(asdict(self.theme)).values())

    def _open(self, trainer: Run, kind: Kind) -> Bar | None:
        self._run = trainer
        return super()._open(trainer, kind)

    def _make_bar(self, console: Console, kind: Kind) -> Bar:
        if console == "plain_notebook":
            return LineBar(self._seconds_between_lines)
        if self._screen is None:
            assert self._run is not None
            self._screen = RichScreen(partial(self.configure_columns, self._run), self._console_kwargs)
        return RichBar(self._screen, self._stays(console))

    def _text(self, metrics: Mapping[str, float | str]) -> str:
        theme = self.theme
        parts = [
            f"{name}: {value if isinstance(value, str | int) else format(value, theme.metrics_format)}"
            for name, value in metrics.items()
        ]
        return theme.metrics_text_delimiter.join(parts)

    def __getstate__(self) -> dict[str, object]:
        """Leave out the screen: it belongs to this process."""
        return {**super().__getstate__(), "_screen": None, "_run": None}


def columns_of(styles: Mapping[str, object]) -> dict[str, object]:
    """Return the columns of a bar by name.

    Args:
        styles: by the name of the column: ``description``, ``progress_bar``, ``progress_bar_finished``,
            ``progress_bar_pulse``, ``batch_progress``, ``time``, ``processing_speed`` and ``metrics``.
    """
    progress: Any = importlib.import_module("rich.progress")
    table: Any = importlib.import_module("rich.table")
    text: Any = importlib.import_module("rich.text")

    def column(field: str, style: str, hidden_as: str | None = None) -> object:
        made = progress.TextColumn(field, style=styles[style], markup=False, table_column=table.Column(no_wrap=True))
        made.hidden_as = hidden_as
        return made

    def render_metrics(_: object, task: Any) -> object:
        return text.Text(task.fields["metrics"], style=styles["metrics"], no_wrap=True, overflow="ellipsis")

    bar = progress.BarColumn(
        bar_width=None,
        complete_style=styles["progress_bar"],
        finished_style=styles["progress_bar_finished"],
        pulse_style=styles["progress_bar_pulse"],
        table_column=table.Column(ratio=1, min_width=_NARROWEST_BAR),
    )
    metrics = type("MetricsColumn", (progress.ProgressColumn,), {"render": render_metrics})
    return {
        "description": column("{task.description}", "description"),
        "bar": bar,
        "count": column("{task.fields[count]}", "batch_progress"),
        "time": column("{task.fields[time]}", "time", "time"),
        "rate": column("{task.fields[rate]}", "processing_speed", "rate"),
        # the only column that may shrink; its text is cut off, not wrapped
        "metrics": metrics(table_column=table.Column(no_wrap=False)),
    }


class RichScreen:
    """The live display of up to two bars; it exists while at least one is open.

    Args:
        columns: returns the columns; those that may be hidden are marked by `columns_of`.
        console_kwargs: arguments of ``rich.console.Console``.
    """

    def __init__(self, columns: Callable[[], Sequence[Any]], console_kwargs: Mapping[str, Any]) -> None:
        self._make_columns, self._console_kwargs = columns, console_kwargs
        self._progress: Any = None
        self._columns: Sequence[object] = ()

    def add(self) -> object:
        """Return the task of a new bar, below the open ones."""
        if self._progress is None:
            self._progress = self._open()
            self._progress.start()
        return self._progress.add_task("", total=None, count="", time="", rate="", metrics="")

    def update(self, task: object, **fields: object) -> None:
        """Show the changes of a bar."""
        self._progress.update(task, **fields)
        self._progress.columns = self._visible()
        self._progress.refresh()

    def _visible(self) -> list[object]:
        """Return the columns; without the times, and without the speed, if the metrics would be cut off otherwise."""
        tasks = self._progress.tasks
        widths = {
            name: max(len(task.fields[name]) + 1 for task in tasks) for name in ("count", "time", "rate", "metrics")
        }
        room = self._progress.console.width - max(len(task.description) for task in tasks) - _NARROWEST_BAR - 1
        hidden = set[str]()
        for name in ("time", "rate"):
            if sum(widths.values()) > room:
                hidden.add(name)
                del widths[name]
        return [column for column in self._columns if getattr(column, "hidden_as", None) not in hidden]

    def remove(self, task: object, *, keep: bool) -> None:
        """Remove a bar; the last one stays on the screen as lines if `keep`."""
        if keep:
            self._close(is_transient=False)
            return
        self._progress.remove_task(task)
        if not self._progress.tasks:
            self._close(is_transient=True)

    def abandon(self) -> None:
        """Draw nothing more: the output is broken."""
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.console.quiet = True
            progress.stop()

    def _close(self, *, is_transient: bool) -> None:
        self._progress.live.transient = is_transient
        self._progress.stop()
        self._progress = None

    def _open(self) -> object:
        progress: Any = importlib.import_module("rich.progress")
        console: Any = importlib.import_module("rich.console").Console(**{"file": sys.stdout, **self._console_kwargs})
        console.on_broken_pipe = _raise_again  # rich would end the program
        self._columns = self._make_columns()
        # drawn only when the loop asks for it: no thread reads what training writes
        return progress.Progress(*self._columns, console=console, auto_refresh=False, expand=True)


class RichBar:
    """A bar on a `RichScreen`, added when a count begins."""

    interval: float = 0.2

    def __init__(self, screen: RichScreen, stays: Stays) -> None:
        self._screen, self._stays = screen, stays
        self._has_ended = False
        self._task: object = None
        self._total = math.inf
        self._initial = 0
        self._started = self._paused = 0.0

    def begin(self, description: str, total: float, done: int) -> None:
        if self._has_ended and self._stays():
            self._remove(keep=True)
        self._has_ended = False
        if self._task is None:
            self._task = self._screen.add()
        self._total, self._initial = total, done
        self._started = self._paused = monotonic()
        self._show(done, description=description, metrics="")

    def show(self, done: int, postfix: Postfix) -> None:
        self._show(done, **({} if postfix is None else {"metrics": postfix()}))

    def pause(self, done: int, postfix: Postfix) -> None:
        self.show(done, postfix)
        self._paused = monotonic()

    def resume(self) -> None:
        self._started += monotonic() - self._paused

    def end(self, done: int, postfix: Postfix) -> None:
        self.show(done, postfix)
        self._has_ended = True

    def close(self, done: int, postfix: Postfix, *, keep: bool) -> None:
        if self._task is None:
            return
        if keep:
            self.show(done, postfix)
        self._remove(keep=keep)

    def abandon(self) -> None:
        self._screen.abandon()
        self._task = None

    def _remove(self, *, keep: bool) -> None:
        self._screen.remove(self._task, keep=keep)
        self._task, self._has_ended = None, False

    def _show(self, done: int, **fields: object) -> None:
        elapsed = monotonic() - self._started
        rate = (done - self._initial) / elapsed if elapsed > 0 else 0.0
        total = None if math.isinf(self._total) else int(self._total)
        remaining = (total - done) / rate if total is not None and rate else None
        self._screen.update(
            self._task,
            completed=done,
            total=total,
            count=f"{done}/{'--' if total is None else total}",
            time=f"{_format_clock(elapsed)} • {_format_clock(remaining)}",
            rate=f"{rate:.2f}it/s",
            **fields,
        )


def _raise_again() -> None:
    """Raise the error that is being handled."""
    raise  # noqa: PLE0704


def _format_clock(seconds: float | None) -> str:
    if seconds is None:
        return "-:--:--"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
