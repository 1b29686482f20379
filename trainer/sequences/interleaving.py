"""Interleaving: which of several sources comes at each position, in exact proportions and computed where it is read."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

from ..data.seed import derive_seed, mix_seed

SCALE: Final = 1 << 40
"""The sum of the weights of a phase, as integers: proportions are exact to one draw in so many."""
WINDOW: Final = 1024
"""Positions that are ordered together; a function of the position is asked once in so many."""
_BITS: Final = 24
"""Of the 64 bits of a hash, those above the 40 that are used."""
_NUM_KEPT: Final = 8

Draw = tuple[int, int]
"""A source, and how many of its draws came before."""


class _Phase(NamedTuple):
    """Positions with the same weights."""

    start: int
    weights: list[int]
    before: list[int]
    """For each source, `SCALE` times the draws that are expected before the start."""


class Interleaving:
    """The source at each position of an endless sequence, with the number of its draws before.

    The k-th draw of a source falls at a random place in the interval in which its expected number of draws grows from k
    to k + 1. So any stretch holds each source's share to within two draws, the number of draws before any position is
    known without those before, and all of it depends on weights and seed alone.

    Args:
        phases: from which position on which weights hold; the first begins at 0.
        keys: an integer for each source, which chooses the places of its draws.
        weights_at: in place of `phases`: returns the weights at a position, a multiple of `WINDOW`.
    """

    def __init__(
        self,
        phases: Sequence[tuple[int, Sequence[float]]],
        keys: Sequence[int],
        weights_at: Callable[[int], Sequence[float]] | None = None,
    ) -> None:
        self._keys = list(keys)
        self._weights_at = weights_at
        self._phases: list[_Phase] = []
        for start, weights in phases if weights_at is None else [(0, weights_at(0))]:
            self._add(start, weights)
        self._windows: OrderedDict[int, tuple[int, list[Draw]]] = OrderedDict()

    def __getstate__(self) -> dict[str, object]:
        """Leave out the windows, which are computed again."""
        return {**self.__dict__, "_windows": OrderedDict()}

    def _add(self, start: int, weights: Sequence[float]) -> None:
        before = self._expected(start) if self._phases else [0] * len(self._keys)
        self._phases.append(_Phase(start, _scale_weights(weights), before))

    def _phase(self, position: int) -> int:
        """Return the number of the phase that holds a position."""
        if self._weights_at is not None:
            while len(self._phases) * WINDOW <= position:
                start = len(self._phases) * WINDOW
                self._add(start, self._weights_at(start))
            return position // WINDOW
        return bisect_right(self._phases, position, key=lambda phase: phase.start) - 1

    def _expected(self, position: int) -> list[int]:
        phase = self._phases[-1] if position >= self._phases[-1].start else self._phases[self._phase(position)]
        length = position - phase.start
        return [before + weight * length for before, weight in zip(phase.before, phase.weights, strict=True)]

    def _drawn_before(self, time: int) -> list[int]:
        """Return the draws of each source whose place in time is before an integer."""
        self._phase(time)  # makes the phases up to there
        counts = []
        for key, expected in zip(self._keys, self._expected(time), strict=True):
            whole, rest = divmod(expected, SCALE)
            counts.append(whole + (rest > 0 and _place_in_interval(key, whole) < rest))
        return counts

    def _span(self, time: int) -> tuple[int, int]:
        """Return the beginning and end of the window that holds a point in time."""
        number = self._phase(time)
        first = self._phases[number].start
        start = first + (time - first) // WINDOW * WINDOW
        end = start + WINDOW
        if number + 1 < len(self._phases):
            end = min(end, self._phases[number + 1].start)
        return start, end

    def _window(self, start: int, end: int) -> tuple[int, list[Draw]]:
        """Return the position at which a window of time begins, and its draws in order."""
        kept = self._windows.get(start)
        if kept is None:
            before, after = self._drawn_before(start), self._drawn_before(end)
            phase = self._phases[self._phase(start)]
            timed: list[tuple[float, int, int]] = []
            for source, expected in enumerate(self._expected(start)):
                key, weight = self._keys[source], phase.weights[source]
                timed += [
                    ((number * SCALE + _place_in_interval(key, number) - expected) / weight, source, number)
                    for number in range(before[source], after[source])
                ]
            timed.sort()
            kept = self._windows[start] = sum(before), [(source, number) for _, source, number in timed]
            if len(self._windows) > _NUM_KEPT:
                self._windows.popitem(last=False)
        else:
            self._windows.move_to_end(start)
        return kept

    def chunk(self, position: int) -> tuple[int, list[Draw]]:
        """Return the position of the first of about a thousand draws, and those; the given position is among them."""
        _, first, draws = self._find(position)
        return first, draws

    def counts(self, position: int) -> list[int]:
        """Return the number of draws of each source before a position."""
        start, first, draws = self._find(position)
        counts = self._drawn_before(start)
        for source, _ in draws[: position - first]:
            counts[source] += 1
        return counts

    def _find(self, position: int) -> tuple[int, int, list[Draw]]:
        """Return where in time the window of a position begins, the position of its first draw, and its draws."""
        start, end = self._span(position)  # the number of draws before any time differs from it by less than sources
        first, draws = self._window(start, end)
        while position < first:
            start, end = self._span(start - 1)
            first, draws = self._window(start, end)
        while position >= first + len(draws):
            start, end = self._span(end)
            first, draws = self._window(start, end)
        return start, first, draws

    def draws(self, start: int) -> Iterator[Draw]:
        """Yield the draws from a position on, without end."""
        while True:
            first, draws = self.chunk(start)
            yield from draws[start - first :]
            start = first + len(draws)

    def end_of(self, source: int, number: int, limit: int) -> int | None:
        """Return the position after the draw `number` of a source; None if it does not come in `limit` positions."""
        high = WINDOW
        while self._drawn_before(high)[source] <= number:
            if high > limit:
                return None
            high *= 2
        low = 0
        while high - low > 1:
            middle = (low + high) // 2
            if self._drawn_before(middle)[source] <= number:
                low = middle
            else:
                high = middle
        first, draws = self._window(*self._span(low))
        return first + draws.index((source, number)) + 1


def _place_in_interval(key: int, number: int) -> int:
    """Return where in its interval a draw falls, below `SCALE`."""
    return mix_seed(key, number) >> _BITS


def _scale_weights(weights: Sequence[float]) -> list[int]:
    """Return integers in the proportions of the weights, whose sum is `SCALE`; a weight above 0 stays above."""
    total = math.fsum(weights)
    scaled = [max(int(weight / total * SCALE), 1) if weight > 0 else 0 for weight in weights]
    scaled[scaled.index(max(scaled))] += SCALE - sum(scaled)
    return scaled


def keys_of(names: Sequence[str], seed: int) -> list[int]:
    """Return a key for each source that depends on its name, and not on the other sources."""
    hashes = (blake2b(name.encode(), digest_size=8).digest() for name in names)
    return [derive_seed(seed, int.from_bytes(hashed, "little")) for hashed in hashes]
