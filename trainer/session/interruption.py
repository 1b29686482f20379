"""Interruption of a run by signals and by the clock: a handler sets a flag, the step boundary reads it."""

from __future__ import annotations

import logging
import math
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from types import TracebackType
from typing import Any

from ...common.storage import AnyPath
from ...strategies.launch.signal_handlers import handling_signals

_log = logging.getLogger(__name__)


class Interruption:
    """Asks training to end at the next step boundary; a second signal ends the process at once.

    SIGINT ends `fit` with KeyboardInterrupt, SIGTERM and SIGUSR1 with ``SystemExit(143)``, the code by which SLURM and
    Kubernetes recognize a preempted job; in all three cases after a checkpoint. ``max_time`` ends it without an error.

    Args:
        max_time: how long training may take.
        is_alone: whether this process's signals and clock take effect at once; several ranks first `agree`.
    """

    def __init__(self, max_time: timedelta | None = None, *, is_alone: bool = True) -> None:
        self.has_limit = max_time is not None
        self._is_alone = is_alone
        self._seconds = math.inf if max_time is None else max_time.total_seconds()
        self._agreed_seconds = 0.0
        self._newest: Callable[[], AnyPath | None] = lambda: None
        self.start(0.0)
        self.received: int | None = None
        """The signal that this process has received."""
        self.signal: int | None = None
        """The signal that ends training, the same on all ranks."""

    def start(self, elapsed: float) -> None:
        """Start the clock of a run that has already trained for `elapsed` seconds."""
        self._began = time.monotonic() - elapsed

    def elapsed(self) -> float:
        """Return the seconds of training, including those before a resume."""
        return time.monotonic() - self._began

    def agreed(self) -> float:
        """Return the seconds of training at the ranks' last meeting, the same on all of them."""
        return self.elapsed() if self._is_alone else self._agreed_seconds

    def agree(self, signal: int, seconds: float) -> None:
        """Set what the ranks agreed on: a signal that any of them received (0 for none), and the longest time."""
        self.signal = signal or None
        self._agreed_seconds = seconds

    @property
    def is_requested(self) -> bool:
        """Whether a signal was received."""
        return self.signal is not None

    def is_time_up(self) -> bool:
        """Whether ``max_time`` has passed."""
        return self.agreed() >= self._seconds

    def listening(self, newest: Callable[[], AnyPath | None]) -> AbstractContextManager[None]:
        """Return a context in which this handles signals, as in `handling_signals`; `newest` returns a checkpoint."""
        self._newest = newest
        return handling_signals(self._handle)

    def _handle(self, number: int) -> None:
        if self.received is not None:
            if number != signal.SIGINT:
                raise SystemExit(128 + number)
            raise interrupted_inside(KeyboardInterrupt(), self._newest())
        self.received = number
        if self._is_alone:
            self.signal = number

    def raise_if_requested(self, checkpoint: AnyPath | None) -> None:
        """Raise what the signal asks for once training has ended; the message says where to resume.

        Raises:
            KeyboardInterrupt: after SIGINT.
            SystemExit: with 143 after SIGTERM or SIGUSR1.
        """
        if self.signal == signal.SIGINT:
            message = f"Training ended at a step boundary; {_way_on(checkpoint)}."
            raise _in_short(KeyboardInterrupt(), message) from None
        if self.signal is not None:
            name = signal.Signals(self.signal).name
            _log.warning("%s received: training ended at a step boundary; %s", name, _way_on(checkpoint))
            raise SystemExit(143) from None


def interrupted_inside(error: KeyboardInterrupt, checkpoint: AnyPath | None) -> KeyboardInterrupt:
    """Return the exception of a Ctrl-C that did not wait for a step's end, with the checkpoint to resume from."""
    way_on = "no checkpoint was saved before" if checkpoint is None else _way_on(checkpoint)
    return _in_short(error, f"Training ended inside a step; {way_on}.")


def _in_short(error: KeyboardInterrupt, message: str) -> KeyboardInterrupt:
    """Give an exception a message; if nobody catches it, it is shown without a traceback.

    It is not a subclass, because Python checks the class to end the program as SIGINT does.
    """
    error.args = (message,)
    vars(error)["_render_traceback_"] = lambda: [f"KeyboardInterrupt: {message}"]  # for IPython and notebooks
    before = sys.excepthook
    if before.__module__ != __name__:

        def show(kind: type[BaseException], error: Any, traceback: TracebackType | None) -> None:
            if kind is KeyboardInterrupt and hasattr(error, "_render_traceback_"):
                sys.stderr.write("\n".join([*error._render_traceback_(), ""]))
            else:
                before(kind, error, traceback)

        sys.excepthook = show
    return error


def _way_on(checkpoint: AnyPath | None) -> str:
    if checkpoint is None:
        return "no checkpoint was saved (enable_checkpointing=True saves one)"
    return f"resume with fit(..., ckpt_path={str(checkpoint)!r})"
