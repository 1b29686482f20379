"""Cases of large tables: `make test` takes some of them, `make sweep` takes all.

A test that asks for them is marked `sweep`, by which `make sweep` finds it.
"""

import os
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

Row = TypeVar("Row")
Column = TypeVar("Column")

IS_SWEEP = os.environ.get("ECHELON_SWEEP") == "1"
"""Whether all cases are taken."""


def dealt(rows: Sequence[Row], columns: Sequence[Column], steps: Sequence[int]) -> list[tuple[Row, Column]]:
    """Return the pairs of rows and columns that are tested: in a sweep all, else one for each row and each step.

    Row n meets the columns n + step, counted round, so that columns meet about as many rows as each other.

    Args:
        rows: what stands first in a pair.
        columns: what stands second.
        steps: how many columns lie between a row's own place and each of those that it meets.
    """
    if IS_SWEEP:
        return [(row, column) for row in rows for column in columns]
    return [(row, columns[(place + step) % len(columns)]) for place, row in enumerate(rows) for step in steps]


def only_in_sweep(*cases: Any) -> list[Any]:
    """Return cases of a parametrized test, of which tuples are several arguments, that `make sweep` alone takes."""
    several = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=pytest.mark.only_in_sweep) for case in several]
