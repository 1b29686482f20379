"""Tables of results and of submodules, in box-drawing characters."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

_WIDTH: Final = 80
_NARROWEST: Final = 16
"""Columns of text that a table which is too wide leaves them."""


def render_table(results: Sequence[Mapping[str, float]], title: str) -> str:
    """Return the results of `validate` or `test` as a table with a row per metric and a column per loader.

    Columns that do not fit into 80 characters follow in another table below.

    Args:
        results: the metrics of each loader; the suffix ``/dataloader_idx_N`` of loader N is left out.
        title: the header of the name column, such as ``Test metric``.
    """
    columns = [_without_suffix(metrics, index) for index, metrics in enumerate(results)]
    names = list(dict.fromkeys(name for column in columns for name in column))
    heads = ["Value"] if len(columns) == 1 else [f"DataLoader {index}" for index in range(len(columns))]
    cells = [[_format_number(column.get(name)) for name in names] for column in columns]
    shown = [_shorten_name(name, _WIDTH // 2) for name in names]
    room = _WIDTH - 4 - max(len(title), *map(len, shown), 0)
    tables = []
    start = 0
    while start < len(columns):
        stop, used = start, 0
        while stop < len(columns) and (stop == start or used + _column_width(heads[stop], cells[stop]) <= room):
            used += _column_width(heads[stop], cells[stop])
            stop += 1
        rows = [[name, *(cells[column][row] for column in range(start, stop))] for row, name in enumerate(shown)]
        tables.append(render_boxed_table([title, *heads[start:stop]], rows, "<" + ">" * (stop - start)))
        start = stop
    return "\n".join(tables)


def render_fitted_table(head: Sequence[str], rows: Sequence[Sequence[str]], alignment: str, width: int | None) -> str:
    """Return a framed table that fits into `width` characters, where its words allow it; None sets no limit.

    Long texts in columns that are aligned left are wrapped; then columns that do not fit follow in another table below,
    which repeats the first.
    """
    if width is None:
        return render_boxed_table(head, rows, alignment)
    wide = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    while sum(wide) + 3 * len(wide) + 1 > width:
        longest = max((wide[at], at) for at in range(len(wide)) if alignment[at] == "<" or at == 0)[1]
        if wide[longest] <= _NARROWEST or alignment[longest] != "<":
            break
        wide[longest] -= 1
    shown = [line for row in rows for line in _wrap_row(row, wide)]
    tables, start = [], 1
    while start < len(head):
        stop, used = start, wide[0] + 4
        while stop < len(head) and (stop == start or used + wide[stop] + 3 <= width):
            used += wide[stop] + 3
            stop += 1
        columns = [0, *range(start, stop)]
        cut = [[row[column] for column in columns] for row in (head, *shown)]
        tables.append(render_boxed_table(cut[0], cut[1:], "".join(alignment[column] for column in columns)))
        start = stop
    return "\n".join(tables)


def _wrap_row(row: Sequence[str], wide: Sequence[int]) -> Iterator[list[str]]:
    cells = [textwrap.wrap(cell, width) or [""] for cell, width in zip(row, wide, strict=True)]
    for line in range(max(map(len, cells))):
        yield [cell[line] if line < len(cell) else "" for cell in cells]


def render_boxed_table(head: Sequence[str], rows: Sequence[Sequence[str]], alignment: str) -> str:
    """Return a framed table; `alignment` has a ``<`` (left) or ``>`` (right) for each column."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]

    def rule(left: str, line: str, crossing: str, right: str) -> str:
        return left + crossing.join(line * (width + 2) for width in widths) + right

    def cells(row: Sequence[str], bar: str) -> str:
        padded = (f" {cell:{side}{width}} " for cell, side, width in zip(row, alignment, widths, strict=True))
        return bar + bar.join(padded) + bar

    lines = [rule("┏", "━", "┳", "┓"), cells(head, "┃"), rule("┡", "━", "╇", "┩")]
    lines += [cells(row, "│") for row in rows]
    lines.append(rule("└", "─", "┴", "┘"))
    return "\n".join(lines)


def _without_suffix(metrics: Mapping[str, float], index: int) -> dict[str, float]:
    return {name.removesuffix(f"/dataloader_idx_{index}"): value for name, value in metrics.items()}


def _format_number(value: float | None) -> str:
    """Return six significant digits; a dash if the loader does not have the metric."""
    if value is None:
        return "-"
    value = float(value)
    return f"{value:.1f}" if value.is_integer() and abs(value) < 1e6 else f"{value:.6g}"


def _shorten_name(name: str, width: int) -> str:
    return name if len(name) <= width else f"{name[: width // 2]}…{name[len(name) - (width - width // 2 - 1) :]}"


def _column_width(head: str, cells: Sequence[str]) -> int:
    return max(len(head), *map(len, cells), 0) + 3
