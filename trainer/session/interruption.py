"""Interruption of a run by signals and by the clock: a handler sets a flag, the step boundary reads it."""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Final

_log = logging.getLogger(__name__)

_SIGNALS: Final = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))

_ECHO: Final = 1.0
"""Seconds within which a second signal to one of several processes counts as the same."""


class Interruption:
    """Asks training to end at the next step boundary; a second signal ends the process at once.

    SIGINT ends `fit` with KeyboardInterrupt, SIGTERM and SIGUSR1 with ``SystemExit(143)``, the code by which SLURM and
    Kubernetes know a preempted job; in all three cases after a checkpoint. ``max_time`` ends it without an error.

    Args:
        max_time: how long training may take.
        is_alone: whether what happens here counts at once. Several ranks first tell each other, with `agree`.
    """

    def __init__(self, max_time: timedelta | None = None, *, is_alone: bool = True) -> None:
        self.has_limit = max_time is not None
        self._is_alone = is_alone
        self._seconds = math.inf if max_time is None else max_time.total_seconds()
        self._agreed_seconds = 0.0
        self.start(0.0)
        self._received_at = 0.0
        self.received: int | None = None
        """The signal that has come to this process."""
        self.signal: int | None = None
        """The signal that ends training, on all ranks alike."""

    def start(self, elapsed: float) -> None:
        """Start the clock of a run that has already trained for `elapsed` seconds."""
        self._began = time.monotonic() - elapsed

    def elapsed(self) -> float:
        """Return the seconds of training, those before a resume included."""
        return time.monotonic() - self._began

    def agreed(self) -> float:
        """Return the seconds of training, the same on all ranks: those at their last meeting."""
        return self.elapsed() if self._is_alone else self._agreed_seconds

    def agree(self, signal: int, seconds: float) -> None:
        """Set what the ranks agreed on: a signal that came to any of them (0 for none), and the longest time."""
        self.signal = signal or None
        self._agreed_seconds = seconds

    @property
    def is_requested(self) -> bool:
        """Whether a signal has come."""
        return self.signal is not None

    def is_time_up(self) -> bool:
        """Whether ``max_time`` is over."""
        return self.agreed() >= self._seconds

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals inside the block, in the main thread; elsewhere Python leaves them to their handlers.

        Ignored signals stay ignored: SIGINT under nohup, and in a worker, to which the caller passes on its signals.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._handle) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            # schedulers that signal every process also signal the one that passes it on to these
            if number == self.received and not self._is_alone and time.monotonic() - self._received_at < _ECHO:
                return
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        self.received, self._received_at = number, time.monotonic()
        if self._is_alone:
            self.signal = number

    def raise_if_requested(self, checkpoint: Path | None) -> None:
        """End as the signal asks, once training has been brought to an end; say where it can go on from.

        Raises:
            KeyboardInterrupt: after SIGINT.
            SystemExit: with 143 after SIGTERM or SIGUSR1.
        """
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt(f"Training ended at a step boundary; {_way_on(checkpoint)}.")
        if self.signal is not None:
            name = signal.Signals(self.signal).name
            _log.warning("%s received: training ended at a step boundary; %s", name, _way_on(checkpoint))
            raise SystemExit(143)


def _way_on(checkpoint: Path | None) -> str:
    if checkpoint is None:
        return "no checkpoint was saved (enable_checkpointing=True saves one)"
    return f"go on with fit(..., ckpt_path={str(checkpoint)!r})"
