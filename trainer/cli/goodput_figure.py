"""Figure of a run's goodput: all time as one bar, and a timeline with a row per round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...callbacks.figures.figure_file import figure_file
from ...callbacks.goodput.ledger import CATEGORIES, Category
from ...callbacks.goodput.spans import Goodput, Span, format_clock, goodput_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Corners = list[tuple[float, float]]

_COLOURS: Final[dict[Category, str]] = {
    "productive": "#1b7837",
    "validation": "#80c683",
    "redone": "#d73027",
    "checkpoint": "#4575b4",
    "data_wait": "#74add1",
    "start_up": "#fdae61",
    "down": "#bdbdbd",
}
_TICKS: Final = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)
"""Possible intervals of the ticks on the time axis, in seconds."""
_NUM_CELLS: Final = 800
"""Columns of the timeline; a span shorter than a column fills a fraction of its height."""


def draw_account(goodput: Goodput, path: Path, title: str) -> None:
    """Draw an account to a PNG file.

    Raises:
        MissingDependencyError: without matplotlib.
        RunError: if the file cannot be written.
    """
    rows = len(goodput.rounds)
    height = min(12.0, 2.6 + 0.3 * rows)
    with figure_file(path, 10, height, argument="--png") as figure:
        ratios = [0.5, max(1.0, height - 2.4)]
        summary, timeline = figure.subplots(2, 1, gridspec_kw={"height_ratios": ratios})
        share, total = goodput_of(goodput.micros), format_clock(goodput.total, tenths=goodput.total < 60_000_000)
        figure.suptitle(f"{title}\ngoodput {share:.1%} of {total}", fontsize=11)
        _draw_summary(summary, goodput)
        _draw_timeline(timeline, goodput)


def fractions_by_cell(spans: Sequence[Span], begin: int, width: float) -> dict[int, dict[Category, float]]:
    """Return, for each cell of `width` microseconds, the fraction that each category takes."""
    shares: dict[int, dict[Category, float]] = {}
    for span in spans:
        length = span.end - span.begin
        first, last = int((span.begin - begin) / width), int((span.end - begin) / width)
        for index in range(first, last + 1) if length else ():
            left, right = begin + index * width, begin + (index + 1) * width
            overlap = max(0.0, min(right, span.end) - max(left, span.begin)) / length
            cell = shares.setdefault(index, dict.fromkeys(CATEGORIES, 0.0))
            for category, part in span.micros.items():
                cell[category] += part * overlap / width
    return shares


def _draw_summary(axes: Axes, goodput: Goodput) -> None:
    left, total = 0.0, max(1, goodput.total)
    for category, part in goodput.micros.items():
        share = part / total
        axes.barh(
            0, share, left=left, color=_COLOURS[category], label=f"{category.replace('_', ' ')} {share:.1%}", height=1
        )
        left += share
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.5, 0.5)
    axes.set_axis_off()
    axes.legend(ncols=len(CATEGORIES), loc="upper center", bbox_to_anchor=(0.5, 0), frameon=False, fontsize=8)


def _stack_rectangles(
    corners: dict[Category, list[Corners]], cell: Mapping[Category, float], left: float, width: float, low: float
) -> None:
    """Add a rectangle for each category of a cell, stacked; the axis of rounds points down."""
    right = left + width
    for category in CATEGORIES:
        high = low - 0.8 * cell[category]
        if high != low:
            corners[category].append([(left, low), (left, high), (right, high), (right, low)])
        low = high


def _draw_timeline(axes: Axes, goodput: Goodput) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.ticker import AutoLocator, MaxNLocator, MultipleLocator

    begin, total = goodput.spans[0].begin if goodput.spans else 0, max(1, goodput.total)
    width = total / _NUM_CELLS
    corners: dict[Category, list[Corners]] = {category: [] for category in CATEGORIES}
    for number, of_round in groupby(goodput.spans, lambda span: span.round):
        for index, cell in fractions_by_cell(list(of_round), begin, width).items():
            _stack_rectangles(corners, cell, index * width, width, number + 0.4)
    for category, shapes in corners.items():
        axes.add_collection(PolyCollection(shapes, facecolors=_COLOURS[category], antialiaseds=False), autolim=False)
    axes.set_xlim(0, total)
    axes.set_ylim(goodput.rounds[-1].round + 0.6, goodput.rounds[0].round - 0.6)
    axes.set_ylabel("round")
    axes.set_xlabel("time since the first start (h:mm:ss)")
    every = next((step for step in _TICKS if total <= 10e6 * step), _TICKS[-1])
    axes.xaxis.set_major_locator(MultipleLocator(every * 1_000_000) if total <= 10e6 * every else AutoLocator())
    axes.xaxis.set_major_formatter(lambda value, _: format_clock(int(max(0, value)), tenths=every < 1))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
