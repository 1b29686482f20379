"""IntervalClock: tells whether an interval has passed, with the same answer on every rank."""

from __future__ import annotations

import math
import time
from datetime import timedelta

from ..run import Run


class IntervalClock:
    """Tells whether an interval has passed on rank 0, without a collective at every step."""

    def __init__(self, interval: timedelta | None) -> None:
        self._seconds = interval.total_seconds() if interval is not None else math.inf
        self.start(0)

    def start(self, step: int) -> None:
        """Begin an interval."""
        self._began, self._began_at, self._next_look = time.monotonic(), step, step

    def is_over(self, trainer: Run) -> bool:
        """Return whether the interval has passed on rank 0; if so, begin the next. Collective, at some of the steps.

        Ranks ask rank 0 again after half of the steps that would fill the rest of the interval at the pace so far.
        """
        step = trainer.global_step
        if step < self._next_look:
            return False
        passed = time.monotonic() - self._began
        pace = max(passed / max(step - self._began_at, 1), 1e-9)
        wait = max(1, int((self._seconds - passed) / pace / 2))
        is_over: bool
        is_over, self._next_look = trainer.strategy.broadcast((passed >= self._seconds, step + wait))
        if is_over:
            self.start(step)
        return is_over
