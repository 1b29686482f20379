"""Progress displays: a bar that is redrawn, or a few lines where nothing can be redrawn."""

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
"""Epochs that get a line however short they are; later ones get at most one line per second."""

Postfix = Callable[[], str] | None
"""Returns the text behind the count; None to keep the previous text."""


class Bar(Protocol):
    """One progress display. A postfix is computed only if it is shown: reading metrics waits for the device."""

    interval: float
    """Seconds between two calls of `show`."""

    def begin(self, description: str, total: float, done: int) -> None:
        """Start counting from `done` to `total`, which is infinity if unknown."""

    def show(self, done: int, postfix: Postfix) -> None:
        """Show the count."""

    def pause(self, done: int, postfix: Postfix) -> None:
        """Show the count, and stop the clock."""

    def resume(self) -> None:
        """Let the clock continue."""

    def end(self, done: int, postfix: Postfix) -> None:
        """Show the end of a count; `begin` or `close` may follow."""

    def close(self, done: int, postfix: Postfix, *, keep: bool) -> None:
        """Show the last state and leave it if `keep`, otherwise remove the bar."""

    def abandon(self) -> None:
        """Draw nothing more, also when it is deleted: its output is broken."""


class TqdmBar:
    """A tqdm bar, created by `make` when a count begins; in a notebook, a widget."""

    interval: float = 0.2

    def __init__(self, make: Callable[[], Any], leave: bool) -> None:
        self._make = make
        self._leave = leave
        self.tqdm: Any = None
        """None before the first count and after the last."""

    def begin(self, description: str, total: float, done: int) -> None:
        known_total = None if math.isinf(total) else int(total)
        is_new = self.tqdm is None
        if is_new:
            self.tqdm = self._make()
        self.tqdm.initial, self.tqdm.total = done, known_total
        self.tqdm.set_postfix_str("", refresh=False)
        self.tqdm.set_description_str(description, refresh=False)
        if not is_new or hasattr(self.tqdm, "container"):  # a widget takes its length only from reset
            self.tqdm.reset(known_total)
        self.tqdm.n = self.tqdm.last_print_n = done
        self.tqdm.refresh()

    def show(self, done: int, postfix: Postfix) -> None:
        if postfix is not None:
            self.tqdm.set_postfix_str(postfix(), refresh=False)
        if done > self.tqdm.n:
            self.tqdm.update(done - self.tqdm.n)
        else:
            self.tqdm.refresh()

    def pause(self, done: int, postfix: Postfix) -> None:
        self.show(done, postfix)

    def resume(self) -> None:
        self.tqdm.unpause()

    def end(self, done: int, postfix: Postfix) -> None:
        self.show(done, postfix)
        if self._leave:
            self.tqdm.close()
            self.tqdm = None

    def close(self, done: int, postfix: Postfix, *, keep: bool) -> None:
        if self.tqdm is None:
            return
        if keep:
            self.show(done, postfix)
        self.tqdm.n = done  # a widget closed before its end turns red instead of disappearing
        self.tqdm.leave = keep
        self.tqdm.close()
        self.tqdm = None

    def abandon(self) -> None:
        if self.tqdm is not None:
            self.tqdm.disable = True
            self.tqdm = None


class LineBar:
    """A line for a finished count, and one every `interval` seconds of a long count, for pipes and files."""

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

    def abandon(self) -> None:
        self._has_ended = True

    def _print(self, done: int, postfix: Postfix) -> None:
        elapsed = monotonic() - self._started
        rate = (done - self._initial) / elapsed if elapsed > 0 else 0.0
        count = f"{done}" if math.isinf(self._total) else f"{done}/{int(self._total)}"
        details = [_clock(elapsed), f"{rate:.1f}it/s", postfix() if postfix is not None else ""]
        say(f"{self._description}: {count} [{', '.join(filter(None, details))}]")
        self._lines += 1
        self._printed_at = monotonic()


def new_tqdm(console: Console, description: str, *, line: int) -> Any:
    """Return a bar of tqdm at the given line below the cursor.

    Raises:
        MissingDependencyError: if tqdm is not installed.
    """
    try:
        module = importlib.import_module("tqdm.notebook" if console == "notebook" else "tqdm")
    except ImportError as error:
        raise MissingDependencyError(
            f"TQDMProgressBar needs tqdm, which is not installed ({error}); run: pip install tqdm, or set "
            "enable_progress_bar=False."
        ) from error
    lock_threads_only(module.tqdm)
    # without tqdm's monitor thread, which wakes bars that skip updates: ours skip none
    unmonitored = type("Bar", (module.tqdm,), {"monitor_interval": 0})
    # draw every update: the caller has already decided that it is time
    return unmonitored(
        desc=description, position=line, file=sys.stdout, leave=True, mininterval=0, miniters=1, **_width()
    )


def _width() -> dict[str, Any]:
    """Return tqdm's arguments for the width: the terminal's, also when it changes; 80 if it has none."""
    try:
        columns = os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):  # a notebook, whose widget chooses the width
        return {"dynamic_ncols": True}
    return {"dynamic_ncols": True} if columns else {"ncols": 80, "nrows": 20}


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"
