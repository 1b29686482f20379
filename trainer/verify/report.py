"""Report: the outcome of a verification as a table, with a paragraph for each layout that differs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from ...common.table import render_fitted_table

KINDS: Final = ("loss", "gradient norm", "gradients", "parameters", "metrics", "checkpoint")
"""The columns of the table."""


@dataclass(frozen=True)
class Divergence:
    """The first difference between a layout and one process."""

    step: int
    """The optimizer step in which it is first seen, from 1; the step after a checkpoint comes last."""
    kind: str
    """The column of the table, or ``learning rate``, ``buffers`` or ``error``."""
    size: float
    """The largest relative difference of that kind in that step."""
    name: str
    """The parameter, buffer or metric; for gradients, the first in the order in which they are computed."""
    module: str | None
    """The submodule to look at, "" for the module's own step; None if the difference belongs to no submodule."""
    ranks: tuple[int, ...] = ()
    """The ranks that see it."""
    text: str = ""
    """What was found, in sentences."""
    causes: tuple[str, ...] = ()
    """The usual causes of such a difference, the likeliest first."""


@dataclass(frozen=True)
class Comparison:
    """One layout, compared with one process."""

    layout: str
    largest: dict[str, float]
    """The largest relative difference of each kind; without those that were not compared."""
    finding: Divergence | None
    seconds: float = 0.0

    @property
    def is_same(self) -> bool:
        """Whether nothing differs by more than the tolerance."""
        return self.finding is None


@dataclass(frozen=True)
class Report:
    """The outcome of `verify`."""

    comparisons: tuple[Comparison, ...]
    tolerance: float
    steps: int
    global_batch_size: int
    notes: tuple[str, ...] = field(default=())
    """What was switched off, and warnings."""

    @property
    def is_same(self) -> bool:
        """Whether every layout takes the steps of one process."""
        return all(comparison.is_same for comparison in self.comparisons)

    def check(self) -> None:
        """Raise an AssertionError with the report unless every layout takes the steps of one process; for a test."""
        if not self.is_same:
            raise AssertionError(f"layouts must take the steps of one process, but some do not:\n{self}")

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values; an infinite difference is null."""
        return {"is_same": self.is_same, **_replace_not_finite(asdict(self))}

    def __str__(self) -> str:
        return self.as_text()

    def as_text(self, width: int | None = None) -> str:
        """Return the report as text, its table in `width` characters."""
        head = ["Layout", *(kind.capitalize() for kind in KINDS), ""]
        rows = [
            [one.layout, *(_format_cell(one.largest.get(kind)) for kind in KINDS), "same" if one.is_same else "DIFFERS"]
            for one in self.comparisons
        ]
        number = f"{self.steps} step{'s' if self.steps > 1 else ''}"
        begin = f"{number} and one after a checkpoint, each of {self.global_batch_size} samples, in float64: "
        lines = [
            begin + "the largest differences from one process, relative to the largest value.",
            *(f"- {note}" for note in self.notes),
            render_fitted_table(head, rows, "<" + ">" * len(KINDS) + "<", width),
        ]
        for one in self.comparisons:
            if one.finding is not None:
                lines += ["", f"{one.layout}: {one.finding.text}", *(f"  - {cause}" for cause in one.finding.causes)]
        return "\n".join(lines)


def _format_cell(value: float | None) -> str:
    if value is None:
        return "-"
    return "no bound" if not math.isfinite(value) else f"{value:.0e}".replace("0e+00", "0")


def _replace_not_finite(value: object) -> Any:
    if isinstance(value, dict):
        return {key: _replace_not_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_not_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
