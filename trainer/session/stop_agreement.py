"""Meetings of the ranks of a run, in which they agree on signals, failures and requests to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from ...strategies import Strategy
from .interruption import Interruption

_SECONDS_APART: Final = 1.0


class Meetings:
    """Lets ranks agree on a signal, the time and a request to stop, at steps that they know in advance.

    A signal reaches one process, and clocks differ; a rank that stopped by itself would leave the others waiting for
    its gradients. Agreeing at every step would cost 0.2 ms a step. So each meeting sets the next one, about a second of
    steps ahead; ranks with slow steps meet at each step. A run of one process needs no meetings.

    Where ranks may be ahead of each other, a meeting begins at one step and ends at the first step by which every rank
    has begun it: nobody waits for a slower rank. Between epochs all ranks meet at once.
    """

    def __init__(self, strategy: Strategy, interruption: Interruption) -> None:
        self._strategy, self._interruption = strategy, interruption
        self.is_needed = strategy.world_size > 1
        self._last = (0, 0.0)
        self._ahead = 1
        self._wishes_to_stop = False
        self._begun: tuple[int, Callable[[], list[float]]] | None = None

    def meet(
        self, step: int, *, should_stop: bool, has_failed: bool, is_between_epochs: bool = True
    ) -> tuple[bool, bool, int]:
        """Return whether any rank requests to stop, whether any failed, and the step of the next meeting.

        Collective: every rank calls it.
        """
        self._wishes_to_stop |= should_stop
        lead = self._strategy.max_lead
        if lead and not is_between_epochs and self._begun is None:
            self._begun = step + lead + 1, self._begin(step, has_failed=has_failed)
        if self._begun is not None and not is_between_epochs and step < self._begun[0]:
            return False, False, self._begun[0]
        results = [] if self._begun is None else [self._begun[1]()]
        if self._begun is None or is_between_epochs:
            results.append(self._begin(step, has_failed=has_failed)())
        self._begun = None
        return self._agree(step, [max(values) for values in zip(*results, strict=True)])

    def _begin(self, step: int, *, has_failed: bool) -> Callable[[], list[float]]:
        now, interruption = time.monotonic(), self._interruption
        steps, seconds = step - self._last[0], now - self._last[1]
        flags = float(self._wishes_to_stop), float(has_failed), float(interruption.received or 0)
        self._wishes_to_stop, self._last = False, (step, now)
        own = [*flags, interruption.elapsed(), seconds, float(steps)]
        return self._strategy.ranks.all.begin_all_reduce(own, "max")

    def _agree(self, step: int, flags_of_all: Sequence[float]) -> tuple[bool, bool, int]:
        wishes, failures, signal, elapsed, slowest, steps = flags_of_all
        self._interruption.agree(int(signal), elapsed)
        if steps:  # at most twice as far ahead as the last time: the first steps of a run are not typical
            self._ahead = max(1, min(int(steps * _SECONDS_APART / slowest), 2 * self._ahead))
        return bool(wishes), bool(failures), step + self._ahead
