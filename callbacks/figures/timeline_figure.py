"""Figure of a pipeline's step: a row for each rank, with what it did on which micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...strategies.pipeline.timeline import Doing, StageSpan, WindowTimeline
from .figure_file import figure_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS: Final[Mapping[Doing, str]] = {
    "forward": "#1f78b4",
    "backward": "#33a02c",
    "backward of inputs": "#33a02c",
    "backward of weights": "#6a3d9a",
    "transfer": "#ff7f00",
}
_IDLE: Final = "#e6e6e6"
_LETTER: Final = 0.011
"""The width of a digit, as a fraction of the axes."""


def draw_timeline(window: WindowTimeline, path: Path) -> None:
    """Draw the timeline of a window to a PNG file.

    Raises:
        MissingDependencyError: without matplotlib.
        RunError: if the file cannot be written.
    """
    num_ranks = window.schedule.num_ranks
    with figure_file(path, 11, 1.7 + 0.5 * num_ranks, argument="Timeline(path)") as figure:
        figure.suptitle(title_of(window), fontsize=11)
        _draw_rows(figure.subplots(), window)


def title_of(window: WindowTimeline) -> str:
    """Return the schedule, and the measured shares beside the theoretical one."""
    schedule = window.schedule
    order = " (all forwards first, for new shapes)" if window.is_simple else ""
    return (
        f"{schedule.name}{order}, pp={schedule.num_ranks}, {window.num_micro_batches} micro-batches\n"
        f"idle {window.idle_share:.1%}, in theory {window.expected_idle_share:.1%}; "
        f"transfers {window.transfer_share:.1%}"
    )


def _draw_rows(axes: Axes, window: WindowTimeline) -> None:
    schedule, end = window.schedule, window.seconds * 1000
    labels = []
    for rank in range(schedule.num_ranks):
        axes.broken_barh([(0, end)], (rank - 0.4, 0.8), facecolors=_IDLE, label="idle" if rank == 0 else None)
        stages = schedule.stages_of(rank)
        labels.append(f"rank {rank}: {'stage' if len(stages) == 1 else 'stages'} {', '.join(map(str, stages))}")
        own = [span for span in window.spans if span.rank == rank]
        for doing in _COLOURS:
            for place, stage in enumerate(stages):
                _draw_spans(axes, rank, doing, [s for s in own if (s.doing, s.stage) == (doing, stage)], place)
        idle = 1 - sum(span.end - span.begin for span in own) / window.seconds
        axes.annotate(
            f"idle {idle:.0%}", (end, rank), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
        )
        _write_batch_numbers(axes, [span for span in own if span.doing != "transfer"], end)
    for doing in dict.fromkeys(span.doing for span in window.spans):
        axes.broken_barh([], (0, 0), facecolors=_COLOURS[doing], label=doing)
    axes.set_yticks(range(schedule.num_ranks), labels, fontsize=8)
    axes.set_ylim(schedule.num_ranks - 0.5, -0.5)
    axes.set_xlim(0, end)
    axes.set_xlabel("ms since the step's first forward; the numbers are micro-batches")
    axes.legend(ncols=6, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_spans(axes: Axes, rank: int, doing: Doing, spans: Sequence[StageSpan], place: int) -> None:
    """Draw spans of one kind; those of a rank's second and later stages are lighter."""
    height = 0.4 if doing == "transfer" else 0.8
    bars = [(1000 * span.begin, 1000 * (span.end - span.begin)) for span in spans]
    colour = _COLOURS[doing]
    edges = "none" if doing == "transfer" else "white"
    axes.broken_barh(
        bars, (rank - height / 2, height), facecolors=colour, edgecolors=edges, linewidth=0.5, alpha=0.6**place
    )


def _write_batch_numbers(axes: Axes, spans: Sequence[StageSpan], end: float) -> None:
    """Write the micro-batch numbers where there is room."""
    for span in spans:
        text = str(span.micro_batch)
        if 1000 * (span.end - span.begin) > _LETTER * len(text) * end:
            middle = 500 * (span.begin + span.end)
            axes.text(middle, span.rank, text, ha="center", va="center", fontsize=7, color="white")
