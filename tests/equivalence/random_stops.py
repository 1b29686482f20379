"""Programs drawn at random that are ended at a call of a hook and started again: each ends as an undisturbed run.

What ends a run is an error, SIGTERM or SIGKILL, on one rank or on all, twice in a row.

Usage: python tests/equivalence/random_stops.py [--first SEED] [--number PROGRAMS] [layout ...]
"""

import argparse
import csv
import math
import os
import random
import signal
import sys
import tempfile
import traceback
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "helpers"))

from matrix import whole_state
from random_modules import module_of
from random_programs import (
    LAYOUTS,
    Counting,
    End,
    Program,
    callbacks_of,
    copied,
    data_ranks_of,
    fit,
    kept_by,
    rows_of,
    trainer_of,
)
from random_runs import REFUSALS, differences

from echelon import Callback, CSVLogger, seed_everything
from echelon.testing import run_ranks

HOOKS = ["setup", "teardown", *(name for name in vars(Callback) if name.startswith("on_") and name != "on_exception")]
ENDS = {
    "an error": ["StopError"],
    "SIGTERM": ["SystemExit: 143", "killed by SIGTERM"],
    "SIGKILL": ["killed by SIGKILL"],
}
"""What may end a run, and what says so."""
STARTS = 3
"""How often a program is started, the last time to its end."""


class StopError(Exception):
    """Ends a run."""


@dataclass(frozen=True)
class Stop:
    """What ends a run, at which call of its hooks, on which ranks, and behind how many callbacks it is called."""

    how: str
    call: int
    ranks: range
    place: int

    @classmethod
    def drawn(cls, draw, calls):
        """Return one of those of a run, whose ranks have made these calls."""
        rank = draw.choice((None, draw.randrange(len(calls))))
        call = draw.randrange(len(calls[rank or 0]))
        ranks = range(len(calls)) if rank is None else range(rank, rank + 1)
        return cls(draw.choice(["an error", *ENDS]), call, ranks, draw.choice((0, 1, 9)))


class Stopping(Callback):
    """Notes the calls of its hooks, and ends the run at one of them."""

    def __init__(self, stop):
        is_here = stop is not None and int(os.environ.get("RANK", "0")) in stop.ranks
        self.stop, self.calls = stop if is_here else None, []

    def note(self, hook):
        self.calls.append(hook)
        if self.stop is None or len(self.calls) != self.stop.call + 1:
            return
        if self.stop.how == "an error":
            raise StopError(hook)
        os.kill(os.getpid(), getattr(signal, self.stop.how))


def noting(hook):
    """Return a method that notes its call."""
    return lambda self, *_, **__: self.note(hook)


for each in HOOKS:
    setattr(Stopping, each, noting(each))


def program_of(seed):
    """Return the program of a seed, which saves checkpoints and logs no durations; no hook ends its run."""
    program = Program.drawn(seed)
    names = dict.fromkeys(("checkpoints", *program.callbacks))
    chosen = tuple(name for name in names if name not in ("throughput", "devices"))
    return replace(program, callbacks=chosen, last_epoch=None)


def run(seed, layout, folder, stop):
    """Return how a program ends that goes on from its last checkpoint, and the calls of hooks on this rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    program, data_ranks = program_of(seed), data_ranks_of(layout)
    seed_everything(seed, verbose=False)
    module, stopping, logger = module_of(program), Stopping(stop), CSVLogger(folder, "csv", version=0)
    named = list(callbacks_of(program, folder, data_ranks).items())
    named.insert(len(named) if stop is None else stop.place, ("noting", stopping))
    callbacks = dict(named)
    trainer = trainer_of(program, layout, folder, data_ranks, callbacks, [Counting()], logger)
    fit(trainer, module, program, "last", data_ranks)
    end = End(
        copied(whole_state(trainer, module)),
        curve(folder) if trainer.is_global_zero else [],
        module.rates,
        (trainer.global_step, trainer.current_epoch),
        {name: float(value) for name, value in trainer.callback_metrics.items()},
        kept_by(callbacks["checkpoints"]),
    )
    return end, stopping.calls


def curve(folder):
    """Return the step and name of each value in the logger's file, and the value."""
    path = folder / "csv" / "version_0" / "metrics.csv"
    if not path.exists():
        return []
    with path.open() as file:
        rows = [(int(row.pop("step")), row) for row in csv.DictReader(file)]
    return rows_of([((step, name), value) for step, row in rows for name, value in row.items() if value])


def started(seed, layout, folder, stop=None):
    """Return the end of a run and the calls of hooks on each rank; if it has failed, None and the error's text."""
    number = LAYOUTS[layout].processes
    try:
        if number == 1 and (stop is None or stop.how == "an error"):
            results = [run(seed, layout, folder, stop)]
        else:
            results = run_ranks(run, number, seed, layout, folder, stop, timeout=120)
    except Exception:  # noqa: BLE001 - it is compared with what was to end the run
        return None, traceback.format_exc()
    return results[0][0], [calls for _, calls in results]


def compare(seed, layout, folder):
    """Return what is not alike in an undisturbed run of a program and in one that is stopped, and where it was."""
    draw, stops = random.Random(f"{seed} {layout}"), []
    undisturbed, calls = started(seed, layout, folder / "undisturbed")
    if undisturbed is None:
        return stops, [] if any(said in calls for said in REFUSALS) else [calls]
    for _ in range(STARTS - 1):
        stops.append(stop := Stop.drawn(draw, calls))
        end, error = started(seed, layout, folder / "stopped", stop)
        if end is None and not any(said in error for said in ENDS[stop.how]):
            return stops, [error]
    end, error = started(seed, layout, folder / "stopped")
    return stops, [error] if end is None else compare_ends(undisturbed, end, program_of(seed))


def compare_ends(undisturbed, end, program):
    """Return what is not alike in the end of an undisturbed run, and in that of one that was stopped."""
    first = end.rates[0][0][0] if end.rates else math.inf  # the step has one call more where reading tells the end
    for one in (undisturbed, end):
        one.rates = [row for row in one.rates if row[0][0] > first]
        names, best = (
            one.saved
        )  # another name where a signal has saved the last step of an epoch before its end was read
        one.saved = [name.replace("-v1", "") for name in names], best.replace("-v1", "")
        if first == math.inf:  # nothing was left to train; no checkpoint has the end of an epoch that was cut short
            one.counters, one.metrics = (), {}
            one.weights.pop("scale", None)
    if program.save_last is not True:  # what a signal has saved stays until something newer is saved
        names, best = end.saved
        more = [name for name in names if name not in undisturbed.saved[0]]
        end.saved = [name for name in names if name not in more or len(more) > 2], best
    weights = undisturbed.weights.items()
    bits = [name for name, value in weights if not torch.equal(value, end.weights[name])]
    return [*differences(undisturbed, end), *(f"{name} has other bits" for name in bits)]


def main():
    """Compare programs, print each difference with what was drawn, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", default=["single"], help=f"any of {', '.join(LAYOUTS)}; by default, one")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--number", type=int, default=100, help="how many are drawn")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    number = 0
    for seed in range(options.first, options.first + options.number):
        for layout in options.layouts:
            if program_of(seed).is_left_out(layout):
                continue
            with tempfile.TemporaryDirectory() as folder:
                stops, said = compare(seed, layout, Path(folder))
            if said:
                number += 1
                print(f"{program_of(seed)}\n{layout}:", *stops, *said, sep="\n  ", flush=True)
    print(f"{options.number} drawn, in {len(options.layouts)} layouts: {number} ends differ from an undisturbed run")
    return 1 if number else 0


if __name__ == "__main__":
    sys.exit(main())
