"""Pace: for how long workers that went on again had been silent, phase by phase."""

from __future__ import annotations

from typing import Final

from .heartbeat import Phase, Record

_WINDOW: Final = 50


class Pace:
    """Measures silences between looks: shorter ones than lie between two looks it misses, and no limit is so short.

    Only the last 50 to 100 steps count; between steps and in evaluations, where what is rare may take longest, all do.
    """

    def __init__(self) -> None:
        self._longest = [0.0] * len(Phase)
        self._before, self._turn = 0.0, 0
        self._seen: Record | None = None
        self._since = self._last = 0.0

    def see(self, now: float, record: Record | None) -> None:
        """Take in a look: the newest beat of those for which all others wait; None if silence says nothing now.

        A silence counts from when this beat was the one that others wait for, and only once another has followed.
        """
        if record != self._seen:
            if self._seen is not None and record is not None:
                self.note(self._seen.phase, self._last - self._since, self._seen.step or 0)
            self._seen = record
            self._since = now if record is None else max(record.time, self._last)
        self._last = now

    def note(self, phase: Phase, seconds: float, step: int) -> None:
        """Count a silence."""
        if phase is Phase.TRAIN and not self._turn <= step < self._turn + _WINDOW:
            self._before = self._longest[phase] if self._turn <= step < self._turn + 2 * _WINDOW else 0.0
            self._turn, self._longest[phase] = step, 0.0
        self._longest[phase] = max(self._longest[phase], seconds)

    def longest(self, phase: Phase) -> float:
        """Return the longest silence in a phase."""
        return max(self._longest[phase], self._before) if phase is Phase.TRAIN else self._longest[phase]
