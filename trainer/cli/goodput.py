"""The command ``echelon goodput``: the time of a run by category, as a table, a figure or JSON."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Final

from ...callbacks.goodput.ledger import CATEGORIES, FILE_NAME, Category, read_ledger
from ...callbacks.goodput.spans import Goodput, account_for_time, format_clock, goodput_of
from ...common.console import say
from ...common.errors import ConfigError, RunError
from ...common.storage import AnyPath, StorePath, any_path, at_hand
from ...common.table import render_boxed_table
from ...common.units import in_units
from .goodput_figure import draw_account
from .output import draw_for_command

_MEANINGS: Final[dict[Category, str]] = {
    "productive": "steps that count",
    "validation": "between steps; counts as well",
    "redone": "steps whose work is lost",
    "checkpoint": "training waited for a checkpoint",
    "data_wait": "training waited for the next batch",
    "start_up": "from a process's start to its first step",
    "down": "nothing ran",
}
_HEAD: Final = ("Round", "Down", "Ran", "Ranks", "Steps", "Lost", "End")
_WIDTH: Final = 80
_SHORTEST_END: Final = 8
_TENTHS_BELOW: Final = 600_000_000
_NAMES: Final = 5

_EPILOG: Final = """\
examples:
  echelon goodput echelon_logs/version_0
  echelon goodput echelon_logs              the newest version
  echelon goodput echelon_logs --since 3    from round 3 on, without the time before it

exit codes:
  0 done   1 the ledger cannot be read, or the figure cannot be written   2 there is no ledger
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run, and what to show about it."""
    parser.epilog = _EPILOG
    parser.add_argument("run", metavar="RUN", help="the folder of a run, or one that contains several")
    parser.add_argument("--png", metavar="FILE", help="the figure's file (goodput.png in the run's folder)")
    parser.add_argument("--json", action="store_true", help="print JSON instead; draws only with --png")
    parser.add_argument("--since", metavar="ROUND", type=int, default=0, help="leave out the rounds before this one")


def find_ledger(run: AnyPath) -> AnyPath:
    """Return the ledger in a run's folder, or that of the newest run below it.

    Raises:
        ConfigError: if there is no ledger.
    """
    if run.is_file() or (run.exists() and not run.is_dir()):
        return run
    if (run / FILE_NAME).is_file():
        return run / FILE_NAME
    below = [path for pattern in ("*", "*/*") for path in run.glob(f"{pattern}/{FILE_NAME}") if path.is_file()]
    if below:
        return max(below, key=_last_activity)
    if not run.exists():
        raise ConfigError(f"RUN must be the folder of a run, got {str(run)!r}, which does not exist; try echelon_logs.")
    names = sorted(path.name for path in run.iterdir())
    content = ", ".join(names[:_NAMES]) + (f" and {len(names) - _NAMES} more" if len(names) > _NAMES else "")
    raise ConfigError(
        f"RUN {str(run)!r} holds no {FILE_NAME}, and neither do the folders below it (found: {content or 'nothing'}); "
        "give the folder of a run whose Trainer has callbacks=[GoodputMonitor()]."
    )


def _last_activity(path: AnyPath) -> float:
    """Return when the run of a ledger was last written to, or in a store, whose clock is another one, last started."""
    if not isinstance(path, StorePath):
        return path.stat().st_mtime
    rounds = read_ledger(at_hand(path)).rounds
    return rounds[-1].start.time if rounds else 0.0


def render_account(goodput: Goodput) -> str:
    """Return the account as tables of at most 80 columns."""
    micros, total = goodput.micros, max(1, goodput.total)
    rows = [
        [
            category.replace("_", " "),
            _format_clock(goodput, micros[category]),
            f"{micros[category] / total:.1%}",
            meaning,
        ]
        for category, meaning in _MEANINGS.items()
    ]
    rows.append(["all", _format_clock(goodput, goodput.total), "100.0%", ""])
    lines = [
        render_boxed_table(["Time", "h:mm:ss", "Share", ""], rows, "<>><"),
        f"Steps: {goodput.kept_steps} count, {goodput.lost_steps} were lost.",
        render_boxed_table(_HEAD, _rows_of_rounds(goodput), ">>>>>><"),
    ]
    causes = [f"Round {one.round}: {one.cause}" for one in goodput.rounds if one.cause]
    lines += [textwrap.fill(cause, 80, subsequent_indent="    ") for cause in causes]
    for one in goodput.rounds:
        if one.upload is not None:
            left, size = in_units(one.upload.left), in_units(one.upload.size)
            text = f"Round {one.round}: {left} of {size} of the checkpoint of step {one.upload.step} were still to be "
            lines.append(textwrap.fill(f"{text}uploaded by rank 0 at its last record.", 80, subsequent_indent="    "))
    advice = next((one.advice for one in reversed(goodput.rounds) if one.advice), "")
    if advice:
        lines.append(textwrap.fill(f"Advice: {advice}", 80, subsequent_indent="    "))
    if goodput.num_skipped:
        lines.append(f"Skipped {goodput.num_skipped} lines that are incomplete, damaged or not from a ledger.")
    return "\n".join(lines)


def as_json(goodput: Goodput) -> dict[str, object]:
    """Return the account as JSON values; times are in seconds."""
    rounds = [asdict(one) for one in goodput.rounds]
    for fields in rounds:
        fields["seconds"] = _to_seconds(fields.pop("micros"))
    return {
        "goodput": goodput_of(goodput.micros),
        "total_seconds": goodput.total / 1_000_000,
        "seconds": _to_seconds(goodput.micros),
        "kept_steps": goodput.kept_steps,
        "lost_steps": goodput.lost_steps,
        "rounds": rounds,
        "skipped_lines": goodput.num_skipped,
    }


def run(options: argparse.Namespace) -> int:
    """Print the account of a ledger and draw it; return 0."""
    path = find_ledger(any_path("RUN", options.run))
    goodput = _read_account(path, options.since)
    if not options.json:
        began = datetime.fromtimestamp(goodput.rounds[0].began, UTC).astimezone()
        say(f"{path.parent}: goodput {goodput_of(goodput.micros):.1%} since {began:%Y-%m-%d %H:%M:%S}")
        say(render_account(goodput))
    draw_for_command(
        lambda target: draw_account(goodput, target, title="/".join(path.parent.absolute().parts[-2:])),
        None if options.png is None else any_path("--png", options.png),
        path.with_name("goodput.png"),
        prints_json=options.json,
    )
    if options.json:  # last, since an error is one JSON value, too
        say(json.dumps({"ledger": str(path), **as_json(goodput)}, indent=2))
    return 0


def _read_account(path: AnyPath, since: int) -> Goodput:
    try:
        ledger = read_ledger(at_hand(path))
    except OSError as error:
        reason = error.strerror or error
        raise RunError(f"The ledger {str(path)!r} cannot be read: {reason}; check the file.") from error
    if not ledger.rounds:
        raise RunError(f"{str(path)!r} holds no valid records, but {ledger.num_skipped} other lines; give another run.")
    if not 0 <= since < len(ledger.rounds):
        raise ConfigError(f"--since must be a round from 0 to {len(ledger.rounds) - 1}, got {since}.")
    return account_for_time(ledger, since)


def _rows_of_rounds(goodput: Goodput) -> list[list[str]]:
    """Return a row for each round, with the last column shortened so that the table has at most 80 columns."""
    rows = []
    for one in goodput.rounds:
        down = one.micros["down"]
        times = [_format_clock(goodput, time) for time in (down, sum(one.micros.values()) - down)]
        steps = [f"{one.first_step}-{one.last_step}", str(one.lost_steps)]
        rows.append([str(one.round), *times, str(one.world_size), *steps, one.end])
    used = sum(max(len(row[column]) for row in (_HEAD, *rows)) + 3 for column in range(len(_HEAD) - 1)) + 4
    room = max(_SHORTEST_END, _WIDTH - used)
    return [[*row, end if len(end) <= room else f"{end[: room - 1]}…"] for *row, end in rows]


def _format_clock(goodput: Goodput, time: int) -> str:
    return format_clock(time, tenths=goodput.total < _TENTHS_BELOW)


def _to_seconds(micros: Mapping[Category, int]) -> dict[str, float]:
    return {category: micros[category] / 1_000_000 for category in CATEGORIES}
