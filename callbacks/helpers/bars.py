"""How progress looks: a bar that is redrawn, or, where nothing can be redrawn, a few lines."""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable
from time import monotonic
from typing import Any, Final, Protocol

from ...strategies.errors import MissingDependencyError
from .console import Console, lock_threads_only, say

_FREE_LINES: Final = 10
"""So many finished epochs get their line however short they are; the later ones at most one a second."""


Postfix = Callable[[], str] | None
"""What stands behind the count; None for what stood there before."""


class Bar(Protocol):
    """One progress display. A postfix is computed only if it is shown: reading metrics waits for the device."""

    interval: float
    """Seconds between two calls of `show`."""

    def begin(self, description: str, total: float, done: int) -> None:
        """Start to count to `total` (infinity if unknown), of which `done` is done already."""

    def show(self, done: int, postfix: Postfix) -> None:
        """Show where we are."""

    def pause(self, done: int, postfix: Postfix) -> None:
        """Show where we are, and stop the clock."""

    def resume(self) -> None:
        """Let the clock run on."""

    def end(self, done: int, postfix: Postfix) -> None:
        """Show the end of a count; another may `begin`, or `close` follow."""

    def close(self, done: int, postfix: Postfix, *, keep: bool) -> None:
        """Show the last state and leave it standing if `keep`, otherwise vanish."""


class TqdmBar:
    """A bar of tqdm's, at the given line below the cursor's; in a notebook, a widget."""

    interval: float = 0.2

    def __init__(self, console: Console, line: int, leave: bool) -> None:
        self._make = _tqdm_class(console)
        self._line = line
        self._leave = leave
        self._bar: Any = None

    def begin(self, description: str, total: float, done: int) -> None:
        known_total = None if math.isinf(total) else int(total)
        if self._bar is None:
            self._bar = self._make(
                desc=description,
                total=known_total,
                initial=done,
                position=self._line,
                file=sys.stdout,
                **_width(),
                leave=True,
                mininterval=0.0,  # the caller has decided already that it is time
                miniters=1,
            )
            return
        self._bar.initial = done
        self._bar.total = known_total
        self._bar.set_postfix_str("", refresh=False)
        self._bar.set_description_str(description, refresh=False)
        self._bar.reset(known_total)
        if done:
            self._bar.n = self._bar.last_print_n = done
            self._bar.refresh()

    def show(self, done: int, postfix: Postfix) -> None:
        if postfix is not None:
            self._bar.set_postfix_str(postfix(), refresh=False)
        if done > self._bar.n:
            self._bar.update(done - self._bar.n)
        else:
            self._bar.refresh()

    def pause(self, done: int, postfix: Postfix) -> None:
        self.show(done, postfix)

    def resume(self) -> None:
        self._bar.unpause()

    def end(self, done: int, postfix: Postfix) -> None:
        self.show(done, postfix)
        if self._leave:
            self._bar.close()
            self._bar = None

    def close(self, done: int, postfix: Postfix, *, keep: bool) -> None:
        if self._bar is None:
            return
        if keep:
            self.show(done, postfix)
        self._bar.n = done  # a widget that is closed before its end does not vanish, but turns red
        self._bar.leave = keep
        self._bar.close()
        self._bar = None


def _width() -> dict[str, Any]:
    """Return tqdm's arguments for the width: the terminal's, also when it changes; 80 where it says it has none."""
    try:
        columns = os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):  # a notebook: its widget knows better
        return {"dynamic_ncols": True}
    return {"dynamic_ncols": True} if columns else {"ncols": 80, "nrows": 20}


class LineBar:
    """A line for a finished count, and one every `interval` seconds of a long one: for pipes and files."""

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self._lines = 0
        self._printed_at = monotonic()

    def begin(self, description: str, total: float, done: int) -> None:
        self._description = description
        self._total = total
        self._initial = done
        self._started = monotonic()
        self._paused = self._started
        self._has_ended = False

    def show(self, done: int, postfix: Postfix) -> None:
        if done < self._total and monotonic() >= self._printed_at + self.interval:
            self._print(done, postfix)

    def pause(self, done: int, postfix: Postfix) -> None:
        self._paused = monotonic()

    def resume(self) -> None:
        self._started += monotonic() - self._paused

    def end(self, done: int, postfix: Postfix) -> None:
        self._has_ended = self._lines < _FREE_LINES or monotonic() >= self._printed_at + 1.0
        if self._has_ended:
            self._print(done, postfix)

    def close(self, done: int, postfix: Postfix, *, keep: bool) -> None:
        if keep and not self._has_ended:
            self._print(done, postfix)

    def _print(self, done: int, postfix: Postfix) -> None:
        elapsed = monotonic() - self._started
        rate = (done - self._initial) / elapsed if elapsed > 0 else 0.0
        count = f"{done}" if math.isinf(self._total) else f"{done}/{int(self._total)}"
        details = [_clock(elapsed), f"{rate:.1f}it/s", postfix() if postfix is not None else ""]
        say(f"{self._description}: {count} [{', '.join(filter(None, details))}]")
        self._lines += 1
        self._printed_at = monotonic()


def open_bar(console: Console, *, line: int, leave: bool, seconds_between_lines: float) -> Bar | None:
    """Return the display that suits the console; None where a second one, below the first, would only be in the way.

    Raises:
        MissingDependencyError: if it needs tqdm, and tqdm is not installed.
    """
    if console == "file":
        return LineBar(seconds_between_lines) if line == 0 else None
    if console == "plain_notebook" and line > 0:
        return None  # its output understands a carriage return, but no cursor movements
    return TqdmBar(console, line, leave)


def _tqdm_class(console: Console) -> type[Any]:
    try:
        module = importlib.import_module("tqdm.notebook" if console == "notebook" else "tqdm")
    except ImportError as error:
        raise MissingDependencyError(
            f"TQDMProgressBar needs tqdm, which is not installed ({error}); run: pip install tqdm, "
            "or set enable_progress_bar=False."
        ) from error
    # its monitor thread would only wake bars that skip updates; ours skip none
    lock_threads_only(module.tqdm)
    return type("Bar", (module.tqdm,), {"monitor_interval": 0})


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"
