"""Judgement of what the ranks of a layout saw: the largest differences from one process, and the first one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from .differences import Deviation
from .observe import Observation
from .recorder import StepNotes

_OF_METRICS: Final = 1e-5
"""The tolerance of metrics: torch keeps callbacks' metrics in float32, and modules compute many with ``.float()``."""
_SMALLEST: Final = 1e-3
"""A number below this counts as this large."""
FORWARD_OR_BACKWARD: Final = ("loss", "gradients", "gradient norm")
"""The kinds of differences that begin in a submodule's forward or backward."""
Differences = Mapping[str, Deviation]


@dataclass
class First:
    """The first difference: in the earliest step, and of the earliest kind in it."""

    step: int
    kind: str
    size: float
    names: dict[str, dict[int, Deviation]] = field(default_factory=dict)
    """What differs, by name and rank."""
    numbers: tuple[float, float] | None = None
    """The value found and that of one process, if these are numbers."""
    is_after_checkpoint: bool = False


@dataclass
class Judgement:
    """All differences of a layout."""

    tolerance: float
    largest: dict[str, float] = field(default_factory=dict)
    first: First | None = None

    def see(self, column: str, first: First, bound: float | None = None) -> None:
        """Enter a difference in its column; keep it if it is the first above the bound."""
        self.largest[column] = max(self.largest.get(column, 0.0), first.size)
        if first.size > (self.tolerance if bound is None else bound) and self.first is None:
            self.first = first


def judge_ranks(ranks: Sequence[Observation], expected: Observation, tolerance: float) -> Judgement:
    """Compare what the ranks of a layout saw with what one process did.

    Args:
        ranks: what each rank saw, by rank.
        expected: what one process saw.
        tolerance: the relative difference up to which numbers count as the same.
    """
    judgement = Judgement(tolerance)
    for index, step in enumerate(expected.notes if ranks[0].notes else ()):
        own = [seen.notes[index] for seen in ranks if index < len(seen.notes)]
        _compare_step(judgement, own, step, len(ranks))
        _compare_rows(judgement, ranks[0].rows.get(step.step, {}), expected.rows.get(step.step, {}), step.step)
    if ranks[0].notes:
        last = expected.notes[-1].step
        _compare_rows(judgement, ranks[0].metrics, expected.metrics, last)
    if ranks[0].resumed:
        after = Judgement(tolerance)
        _compare_step(after, [step for seen in ranks for step in seen.resumed], expected.notes[-1], len(ranks))
        if after.first is not None:
            after.first.is_after_checkpoint = True
        judgement.largest["checkpoint"] = max(after.largest.values())
        judgement.first = judgement.first or after.first
    return judgement


def loss_of_step(notes: Sequence[StepNotes]) -> float:
    """Return the loss of a step over all ranks, averaged over samples or over the units of `Loss`."""
    parts = [loss for step in notes for loss in step.losses]
    count = sum(number for _, number in parts)
    return sum(total for total, _ in parts) / count if count else math.nan


def _compare_step(judgement: Judgement, own: Sequence[StepNotes], expected: StepNotes, num_ranks: int) -> None:
    number = expected.step
    if len(own) < num_ranks or any(step.step != number for step in own):
        judgement.see("loss", First(number, "number of steps", math.inf, {"steps": {}}))
        return
    if expected.losses:
        pair = loss_of_step(own), loss_of_step([expected])
        judgement.see("loss", First(number, "loss", relative_difference(*pair), {"loss": {}}, pair))
    norm = max((step.norm for step in own), key=lambda norm: relative_difference(norm, expected.norm))
    gradients = _by_name([step.gradients for step in own], judgement.tolerance)
    size = max((one.size for step in own for one in step.gradients.values()), default=0.0)
    judgement.see("gradients", First(number, "gradients", size, gradients))
    pair = norm, expected.norm
    judgement.see(
        "gradient norm", First(number, "gradient norm", relative_difference(*pair), {"gradient norm": {}}, pair)
    )
    for step in own:
        rates = list(zip(step.learning_rates, expected.learning_rates, strict=False))
        pair = next(((a, b) for a, b in rates if relative_difference(a, b) > 1e-12), (0.0, 0.0))
        if len(step.learning_rates) != len(expected.learning_rates) or pair != (0.0, 0.0):
            judgement.see("parameters", First(number, "learning rate", math.inf, {"learning rate": {}}, pair))
    size = max((one.size for step in own for one in step.parameters.values()), default=0.0)
    parameters = _by_name([step.parameters for step in own], judgement.tolerance)
    judgement.see("parameters", First(number, "parameters", size, parameters))
    size = max((one.size for step in own for one in step.buffers.values()), default=0.0)
    if size:
        buffers = _by_name([step.buffers for step in own], judgement.tolerance)
        judgement.see("parameters", First(number, "buffers", size, buffers))


def _by_name(ranks: Sequence[Differences], tolerance: float) -> dict[str, dict[int, Deviation]]:
    """Return what differs by name and rank."""
    found: dict[str, dict[int, Deviation]] = {}
    for rank, named in enumerate(ranks):
        for name, one in named.items():
            if one.size > tolerance:
                found.setdefault(name, {})[rank] = one
    return found


def _compare_rows(
    judgement: Judgement,
    found: Mapping[str, float],
    expected: Mapping[str, float],
    step: int,
) -> None:
    worst: First | None = None
    for name in {**expected, **found}:
        pair = found.get(name, math.nan), expected.get(name, math.nan)
        size = relative_difference(*pair)
        if worst is None or size > worst.size:
            worst = First(step, "metrics", size, {name: {}}, pair)
    if worst is not None:
        judgement.see("metrics", worst, max(judgement.tolerance, _OF_METRICS))


def relative_difference(found: float, expected: float) -> float:
    """Return how far a number is from the expected one, relative to the latter."""
    if found == expected or (math.isnan(found) and math.isnan(expected)):
        return 0.0
    size = abs(found - expected) / max(abs(expected), _SMALLEST)
    return math.inf if math.isnan(size) else size
