"""Meetings of the ranks of a run, in which they agree on signals, failures and wishes to stop."""

from __future__ import annotations

import time
from typing import Final

from ...strategies import Strategy
from .interruption import Interruption

_SECONDS_APART: Final = 1.0


class Meetings:
    """Ranks agree on a signal, the time and a wish to stop, at steps that they know beforehand.

    A signal reaches one process, and clocks differ; a rank that stopped by itself would leave the others waiting for
    its gradients. Agreeing at every step would cost 0.2 ms a step. So each meeting sets the next one, about a second of
    steps ahead; ranks with slow steps meet at each. A run of one process needs no meetings.
    """

    def __init__(self, strategy: Strategy, interruption: Interruption) -> None:
        self._strategy, self._interruption = strategy, interruption
        self.is_needed = strategy.world_size > 1
        self._last = (0, 0.0)
        self._ahead = 1

    def meet(self, step: int, *, should_stop: bool, has_failed: bool) -> tuple[bool, bool, int]:
        """Return whether any rank wishes to stop, whether any failed, and the step of the next meeting.

        Collective: every rank calls it.
        """
        now, interruption = time.monotonic(), self._interruption
        steps, seconds = step - self._last[0], now - self._last[1]
        flags = float(should_stop), float(has_failed), float(interruption.received or 0)
        flags_of_all = self._strategy.collectives.all_reduce([*flags, interruption.elapsed(), seconds], "max")
        wishes, failures, signal, elapsed, slowest = flags_of_all
        interruption.agree(int(signal), elapsed)
        self._last = (step, now)
        if steps:  # at most twice as far as the last time: the first steps of a run are far from the usual
            self._ahead = max(1, min(int(steps * _SECONDS_APART / slowest), 2 * self._ahead))
        return bool(wishes), bool(failures), step + self._ahead
