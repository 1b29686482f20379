"""Progress displays: a bar that is redrawn, or a few lines where nothing can be redrawn."""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any, Final, Protocol

from ...common.console import Console, lock_threads_only, say
from ...common.errors import MissingDependencyError

_FREE_LINES: Final = 10
"""Epochs that get a line however short they are; of later ones at most one per second."""

_NARROWER: Final = (
    "{desc}: {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]",
    "{desc}: {n_fmt}/{total_fmt} [{elapsed}{postfix}]",
    "{desc}: {n_fmt}/{total_fmt}{postfix}",
)
"""Formats of tqdm, in this order, for a line in which the metrics would be cut off."""
_NARROWEST_BAR: Final = 3

Stays = Callable[[], bool]
"""Returns whether the count that has just ended stays on the screen, above the next one."""
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

    def __init__(self, make: Callable[[], object], stays: Stays) -> None:
        self._make, self._stays = make, stays
        self._has_ended = False
        self.tqdm: Any = None
        """None before the first count and after the last."""

    def begin(self, description: str, total: float, done: int) -> None:
        if self._has_ended and self._stays():
            self.tqdm.close()
            self.tqdm = None
        self._has_ended = False
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
        self._has_ended = True

    def close(self, done: int, postfix: Postfix, *, keep: bool) -> None:
        if self.tqdm is None:
            return
        if keep:
            self.show(done, postfix)
        self.tqdm.n = done  # a widget closed before its end turns red instead of disappearing
        self.tqdm.leave = keep
        self.tqdm.close()
        self.tqdm, self._has_ended = None, False

    def abandon(self) -> None:
        if self.tqdm is not None:
            self.tqdm.disable = True
            self.tqdm = None


class FewLines:
    """Decision whether a count that is over stays on the screen: the first ones, then at most one per second."""

    def __init__(self) -> None:
        self._lines, self._last = 0, monotonic()

    def __call__(self) -> bool:
        is_free = self._lines < _FREE_LINES or monotonic() >= self._last + 1.0
        if is_free:
            self.count()
        return is_free

    def count(self) -> None:
        """Note that a line was written."""
        self._lines, self._last = self._lines + 1, monotonic()


class LineBar:
    """A line for a finished count, and one every `interval` seconds of a long count, for pipes and files."""

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self._stays = FewLines()
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
            self._stays.count()

    def pause(self, done: int, postfix: Postfix) -> None:
        self._paused = monotonic()

    def resume(self) -> None:
        self._started += monotonic() - self._paused

    def end(self, done: int, postfix: Postfix) -> None:
        self._has_ended = self._stays()
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
        details = [_format_clock(elapsed), f"{rate:.1f}it/s", postfix() if postfix is not None else ""]
        say(f"{self._description}: {count} [{', '.join(filter(None, details))}]")
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
    own: dict[str, object] = {"monitor_interval": 0}
    if console != "notebook":
        own["format_meter"] = staticmethod(partial(_format_bar_line, module.tqdm.format_meter))
    # draw every update: the caller has already decided that it is time
    return type("Bar", (module.tqdm,), own)(
        desc=description, position=line, file=sys.stdout, leave=True, mininterval=0, miniters=1, **_terminal_arguments()
    )


def _format_bar_line(
    format_meter: Callable[..., str], *, ncols: int | None = None, bar_format: str | None = None, **fields: Any
) -> str:
    """Return the line of a tqdm bar in `ncols` columns: whatever else there is gives way to the metrics."""
    from tqdm.utils import disp_len, disp_trim

    whole = format_meter(ncols=None, bar_format=bar_format, **fields)  # its bar, if any, has 10 columns
    if ncols is None or disp_len(whole) <= ncols:
        return format_meter(ncols=ncols, bar_format=bar_format, **fields)
    if bar_format is not None or fields["total"] is None:
        text = whole
    elif disp_len(whole) - 10 + _NARROWEST_BAR <= ncols:
        return format_meter(ncols=ncols, **fields)
    else:
        fields["prefix"] = (fields.get("prefix") or "").removesuffix(": ")
        texts = [format_meter(ncols=None, bar_format=narrower, **fields) for narrower in _NARROWER]
        text = next((text for text in texts if disp_len(text) <= ncols), texts[-1])
    if disp_len(text) <= ncols:
        return text
    end = "..." if fields.get("ascii") is True else "…"
    return disp_trim(text, max(0, ncols - len(end))) + end


def _terminal_arguments() -> dict[str, object]:
    """Return tqdm's arguments for the size: the terminal's, also when it changes; 80 by 20 if it has none."""
    try:
        columns, lines = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):  # a notebook, whose widget chooses the width
        return {"dynamic_ncols": True}
    return {"dynamic_ncols": True} if columns and lines else {"ncols": columns or 80, "nrows": lines or 20}


def _format_clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"
