"""Clocks of trainers that do not wait for each other at every step, and the ledger of their pushes."""

from __future__ import annotations

from array import array
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

COLUMNS: Final = ("trainer", "step", "lead", "updates_between")
"""Of the ledger: which trainer pushed, how many times it had pushed before, how many steps it was ahead of the slowest
trainer with this push, and how many pushes of others were applied between its pull and this push."""


@dataclass
class _Waiting:
    trainer: int
    answer: Future[object]


class StalenessBound:
    """Delays the answers to trainers that would get more than `max_staleness` steps ahead of the slowest.

    A trainer goes on once its next push is within the bound, so no push beyond the bound is ever applied.

    Source: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013.
    """

    def __init__(self, num_trainers: int, max_staleness: int) -> None:
        self._max_staleness = max_staleness
        self._clocks = [0] * num_trainers
        self._pulled = [0] * num_trainers
        self._num_updates = 0
        self._waiting: list[_Waiting] = []
        self._rows: array[int] = array("q")
        self.totals = (0, 0, 0)
        """Over all pushes: their number, and the sum and the largest of their leads."""

    def note(self, trainer: int) -> None:
        """Enter a push in the ledger, as it is applied."""
        between = self._num_updates - self._pulled[trainer]
        self._num_updates += 1
        step = self._clocks[trainer]
        self._clocks[trainer] += 1
        lead = self._clocks[trainer] - min(self._clocks)
        self._rows.extend((trainer, step, lead, between))
        number, total, largest = self.totals
        self.totals = number + 1, total + lead, max(largest, lead)

    def wait(self, trainer: int) -> Future[object]:
        """Return a future that is done once this trainer may go on."""
        waiting = _Waiting(trainer, Future())
        self._waiting.append(waiting)
        return waiting.answer

    def released(self) -> list[Future[object]]:
        """Return the answers of the trainers that may go on now, and that pull the parameters as they are."""
        slowest = min(self._clocks)
        free = [w for w in self._waiting if self._clocks[w.trainer] + 1 - slowest <= self._max_staleness]
        self._waiting = [waiting for waiting in self._waiting if waiting not in free]
        for waiting in free:
            self._pulled[waiting.trainer] = self._num_updates
        return [waiting.answer for waiting in free]

    @property
    def missing(self) -> list[int]:
        """The trainers that others wait for."""
        slowest = min(self._clocks)
        return [trainer for trainer, clock in enumerate(self._clocks) if clock == slowest] if self._waiting else []

    def ledger(self) -> Tensor:
        """Return a row for each push, in the order in which they were applied; see `COLUMNS`."""
        return torch.tensor(self._rows, dtype=torch.int64).view(-1, len(COLUMNS))
