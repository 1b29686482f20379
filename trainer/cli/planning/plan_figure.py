"""Figure of a plan: a bar for each layout, stacked by what a device holds, against the device's memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ....callbacks.figures.figure_file import figure_file
from ....common.units import in_units
from ....strategies.estimate.estimate import Estimate
from ...planning.plan import Plan, PlannedLayout

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS: Final = {
    "parameters": "#1f78b4",
    "gradients": "#a6cee3",
    "optimizer": "#6a3d9a",
    "activations": "#33a02c",
    "gathered": "#fdbf6f",
    "communication": "#ff7f00",
    "workspace": "#bdbdbd",
}
_UNITS: Final = ((1e9, "GB"), (1e6, "MB"), (1e3, "KB"))
_MOST: Final = 24
"""The most bars to draw."""


def draw_plan(plan: Plan, path: Path, title: str) -> None:
    """Draw a plan into a PNG file.

    Raises:
        MissingDependencyError: without matplotlib.
        RunError: if the file cannot be written.
    """
    shown = plan.layouts[:_MOST]
    with figure_file(path, 11, 1.9 + 0.34 * len(shown), argument="--png") as figure:
        figure.suptitle(f"{title}\n{plan.machine}, {plan.global_batch_size:,} samples per step", fontsize=11)
        draw_bars(figure.subplots(), plan, shown)


def draw_bars(axes: Axes, plan: Plan, shown: Sequence[PlannedLayout]) -> None:
    """Draw layouts from top to bottom, with lines at a device's memory and at what a plan uses of it."""
    limit = plan.machine.memory
    largest = max(*(planned.estimate.total for planned in shown), limit)
    held = max(planned.estimate.total for planned in shown)
    is_small = held < limit / 20  # bars as thin as the axis, if it went as far as the memory
    scale = held if is_small else limit
    unit, name = next((size, name) for size, name in _UNITS if scale >= size or size == 1e3)
    # a bar far beyond the memory would leave no room for the others
    end = (1.2 * held if is_small else min(largest, 2.5 * limit) * 1.02) / unit
    for row, planned in enumerate(shown):
        left = 0.0
        for kind, size in _shown_sizes(planned.estimate).items():
            label = kind if row == 0 else None
            axes.barh(row, size / unit, left=left, height=0.72, color=_COLOURS[kind], label=label)
            left += size / unit
        total = in_units(planned.estimate.total)
        text = total if planned.fits else f"{total}: does not fit"
        is_beyond = left > 0.8 * end
        axes.annotate(
            text,
            (min(left, end), row),
            xytext=(-4 if is_beyond else 4, 0),
            textcoords="offset points",
            va="center",
            ha="right" if is_beyond else "left",
            fontsize=8,
            color="#b2182b" if not planned.fits else "black",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.8},
        )
    axes.axvline(limit / unit, color="#b2182b", linewidth=1.5)
    axes.axvline(limit * (1 - plan.machine.margin) / unit, color="#b2182b", linewidth=1, linestyle=":")
    axes.set_yticks(range(len(shown)), [_label_of_bar(planned) for planned in shown], fontsize=8)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, end)
    memory = "the solid line is its memory, the dotted line what a plan may use"
    if is_small:
        memory = f"its memory, {in_units(limit)}, lies far to the right"
    axes.set_xlabel(f"{name} on a device; {memory}")
    axes.legend(ncols=len(_COLOURS), loc="lower center", bbox_to_anchor=(0.42, 1.0), frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _shown_sizes(estimate: Estimate) -> dict[str, float]:
    """Return the sizes of the kinds, which add up to the total: what never coexists is subtracted."""
    sizes, overlap = estimate.by_kind, estimate.overlap
    for kind in ("activations", "workspace", "gradients"):
        taken = min(overlap, sizes[kind])
        sizes[kind] -= taken
        overlap -= taken
    return sizes


def _label_of_bar(planned: PlannedLayout) -> str:
    again = {"": "", "selective": ", selective", "full": ", recomputing"}[planned.recomputes]
    return f"{planned.layout.name}{again}, {planned.num_samples} x {planned.num_micro_batches}"
