"""The command ``echelon samples``: an audit, as a table, of the samples that a run was trained on."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Final

from ...callbacks.helpers.console import say
from ...callbacks.helpers.table import boxed
from ...callbacks.samples.audit import Audit, EpochAudit, audit, samples_folder
from .output import printable

_SHOWN: Final = 10
_EPILOG: Final = """\
exit codes:
  0 every sample was used as often as it should be (in an unfinished epoch: so far)
  1 some samples were not, or the ledger is incomplete   2 there is no ledger, or a file is damaged
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the folder of the run."""
    parser.epilog = _EPILOG
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a run, which contains samples/")


def run(options: argparse.Namespace) -> int:
    """Print the audit; return 0 if it is exact, else 1."""
    audited = audit(samples_folder(options.run))
    say(printable(report(audited)))
    return 0 if audited.is_exact else 1


def report(audited: Audit) -> str:
    """Return an audit as a table, with a line below it for everything that is wrong."""
    several = len({epoch.key.loader for epoch in audited.epochs}) > 1
    head = ["Epoch", *(["Loader"] if several else []), "Used", "Of", "Skipped", "Twice", "Missing", ""]
    rows = [_row(epoch, several) for epoch in audited.epochs]
    lines = [line for epoch in audited.epochs for line in (*_repeated(epoch), *_missing(epoch))]
    return "\n".join([boxed(head, rows, ">" * (len(head) - 1) + "<"), *lines, *audited.faults])


def _row(epoch: EpochAudit, several: bool) -> list[str]:
    key = epoch.key
    name = f"{key.epoch}" + (f", lap {key.lap + 1}" if key.lap else "")
    if epoch.source.num_streams > 1:
        name += f", rank {key.stream}"
    numbers = epoch.used, _planned(epoch), epoch.skipped, len(epoch.repeated), len(epoch.missing)
    return [name, *([str(key.loader)] if several else []), *map(str, numbers), epoch.verdict]


def _planned(epoch: EpochAudit) -> str:
    """Return the planned number of samples or batches; a question mark if a limit decides."""
    end = epoch.source.end
    return "?" if end < 0 else f"{end} batches" if epoch.source.in_batches else str(end)


def _repeated(epoch: EpochAudit) -> Iterator[str]:
    what = "index" if epoch.source.comes_once else "place"
    for repeated in epoch.repeated[:_SHOWN]:
        wheres = "; ".join(map(str, repeated.wheres[:_SHOWN]))
        yield f"Epoch {epoch.key.epoch}: {what} {repeated.what} was used {len(repeated.wheres)} times: {wheres}."
    if len(epoch.repeated) > _SHOWN:
        yield f"Epoch {epoch.key.epoch}: {len(epoch.repeated) - _SHOWN} more were used too often."


def _missing(epoch: EpochAudit) -> Iterator[str]:
    if not epoch.missing:
        return
    # in a stretch of consecutive values, value minus position is constant
    stretches = [[value for _, value in group] for _, group in groupby(enumerate(epoch.missing), lambda x: x[1] - x[0])]
    texts = [f"{values[0]}" if len(values) == 1 else f"{values[0]} to {values[-1]}" for values in stretches[:_SHOWN]]
    more = ", ..." if len(stretches) > _SHOWN else ""
    yield f"Epoch {epoch.key.epoch}: never used: {', '.join(texts)}{more}."
