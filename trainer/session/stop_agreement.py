"""Meetings: when the ranks of a run tell each other what one of them alone knows."""

from __future__ import annotations

import time
from typing import Final

from ...strategies import Strategy
from .interruption import Interruption

_SECONDS_APART: Final = 1.0


class Meetings:
    """Ranks agree on a signal, the time and a wish to stop, at steps that they know beforehand.

    A signal reaches one process, and clocks differ; a rank that stopped by itself would leave the others waiting for
    its gradients. Agreeing at every step would cost each 0.2 ms. So each meeting sets the next one, as many steps ahead
    as were done in a second; slow steps meet at each. A run of one process never has to.
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
        found = self._strategy.collectives.all_reduce([*flags, interruption.elapsed(), seconds], "max")
        wishes, failures, signal, elapsed, slowest = found
        interruption.agree(int(signal), elapsed)
        self._last = (step, now)
        if steps:  # at most twice as far as the last time: the first steps of a run are far from the usual
            self._ahead = max(1, min(int(steps * _SECONDS_APART / slowest), 2 * self._ahead))
        return bool(wishes), bool(failures), step + self._ahead
