"""The command ``echelon samples``: an audit, as a table, of the samples that a run was trained on."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from ...callbacks.samples.audit import Audit, EpochAudit, audit_ledger, samples_folder
from ...common.console import say
from ...common.storage import AnyPath, StorePath, any_path, local_folder
from ...common.table import render_boxed_table
from .output import make_printable

_SHOWN: Final = 10
_EPILOG: Final = """\
exit codes:
  0 every sample was used as often as it should be (in an unfinished epoch: so far)
  1 some samples were not, or the ledger is incomplete   2 there is no ledger, or a file is damaged
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the folder of the run."""
    parser.epilog = _EPILOG
    parser.add_argument("run", metavar="RUN", help="the folder of a run, or its URL, which contains samples/")


def run(options: argparse.Namespace) -> int:
    """Print the audit; return 0 if it is exact, else 1."""
    audited = audit_ledger(_at_hand(samples_folder(any_path("RUN", options.run))))
    say(make_printable(format_audit(audited)))
    return 0 if audited.is_exact else 1


def _at_hand(folder: AnyPath) -> Path:
    return local_folder(folder) if isinstance(folder, StorePath) else folder


def format_audit(audited: Audit) -> str:
    """Return an audit as a table, with a line below it for everything that is wrong."""
    several = len({epoch.key.loader for epoch in audited.epochs}) > 1
    head = ["Epoch", *(["Loader"] if several else []), "Used", "Of", "Skipped", "Twice", "Missing", ""]
    rows = [_format_row(epoch, several) for epoch in audited.epochs]
    lines = [line for epoch in audited.epochs for line in (*_describe_repeated(epoch), *_describe_missing(epoch))]
    return "\n".join([render_boxed_table(head, rows, ">" * (len(head) - 1) + "<"), *lines, *audited.faults])


def _format_row(epoch: EpochAudit, several: bool) -> list[str]:
    key = epoch.key
    name = f"{key.epoch}" + (f", lap {key.lap + 1}" if key.lap else "")
    if epoch.source.num_streams > 1:
        name += f", rank {key.stream}"
    numbers = (
        epoch.used,
        _format_planned(epoch),
        epoch.skipped,
        _total_length(one.what for one in epoch.repeated),
        _total_length(epoch.missing),
    )
    return [name, *([str(key.loader)] if several else []), *map(str, numbers), epoch.verdict]


def _format_planned(epoch: EpochAudit) -> str:
    """Return the planned number of samples or batches; a question mark if a limit decides."""
    end = epoch.source.end
    return "?" if end < 0 else f"{end} batches" if epoch.source.in_batches else str(end)


def _total_length(stretches: Iterable[range]) -> int:
    return sum(map(len, stretches))


def _format_stretch(stretch: range) -> str:
    return f"{stretch[0]}" if len(stretch) == 1 else f"{stretch[0]} to {stretch[-1]}"


def _describe_repeated(epoch: EpochAudit) -> Iterator[str]:
    for repeated in epoch.repeated[:_SHOWN]:
        what = "index" if epoch.source.comes_once else "place"
        what, were = (f"{what}s", "were") if len(repeated.what) > 1 else (what, "was")
        wheres = "; ".join(map(str, repeated.wheres[:_SHOWN]))
        used = f"{what} {_format_stretch(repeated.what)} {were} used {len(repeated.wheres)} times"
        yield f"Epoch {epoch.key.epoch}: {used}: {wheres}."
    if len(epoch.repeated) > _SHOWN:
        more = _total_length(one.what for one in epoch.repeated[_SHOWN:])
        yield f"Epoch {epoch.key.epoch}: {more} more were used too often."


def _describe_missing(epoch: EpochAudit) -> Iterator[str]:
    if epoch.missing:
        more = ", ..." if len(epoch.missing) > _SHOWN else ""
        yield f"Epoch {epoch.key.epoch}: never used: {', '.join(map(_format_stretch, epoch.missing[:_SHOWN]))}{more}."
