"""Covering arrays: few of the rows of a large table of cases, in which each two settings that meet still meet."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, TypeVar

Row = TypeVar("Row")


def covering(rows: Sequence[Row], settings_of: Callable[[Row], Mapping[str, Any]]) -> list[Row]:
    """Return some of the rows, in order, such that each pair of settings that meets in a row meets in one of these.

    What only three settings together cause may be missed. A pair of settings that meets in one row alone keeps that
    row. Of several rows that add as many pairs, the first is taken, so that the choice is always the same.

    Args:
        rows: the cases.
        settings_of: returns the settings of a case, by name; the same names for each.
    """
    pairs = [set(combinations(sorted(settings_of(row).items(), key=lambda item: item[0]), 2)) for row in rows]
    missing: set[Any] = set().union(*pairs)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(rows)), key=lambda place: len(pairs[place] & missing))
        chosen.add(best)
        missing -= pairs[best]
    # rows that were taken early may hold nothing that those taken later lack
    for place in sorted(chosen):
        others = set().union(*(pairs[other] for other in chosen - {place}))
        if pairs[place] <= others:
            chosen.remove(place)
    return [rows[place] for place in sorted(chosen)]
