"""Programs drawn at random that are ended at a call of a hook and started again: each ends as an undisturbed run.

What ends a run is an error, SIGTERM or SIGKILL, on one rank or on all, twice in a row.

Usage: python tests/equivalence/random_stops.py [--first SEED] [--number PROGRAMS] [--in-turn] [layout ...]
"""

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
    LAUNCHED,
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
from random_runs import REFUSALS, differences, make_parser

from echelon import Callback, CSVLogger, seed_everything
from echelon.testing import run_ranks

HOOKS = ["setup", *(name for name in vars(Callback) if name.startswith("on_") and name != "on_exception")]
ENDS = {
    "an error": ["StopError"],
    "SIGTERM": ["SystemExit: 143", "killed by SIGTERM"],
    "SIGKILL": ["killed by SIGKILL"],
}
"""What may end a run, and what says so."""
OF_ELASTIC_RUNS = ("goodput/", "stragglers/", "time/", "elastic/")
"""How the names of values begin that an elastic run logs of itself."""
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
    """Notes the calls of its hooks, and ends the run at one of them, once."""

    def __init__(self, stop, folder):
        self.stop, self.calls, self.folder = stop, [], folder

    def note(self, hook):
        self.calls.append(hook)
        rank = int(os.environ.get("RANK", "0"))
        if self.stop is None or rank not in self.stop.ranks or len(self.calls) != self.stop.call + 1:
            return
        try:
            (self.folder / f"{self.stop}, on {rank}").touch(exist_ok=False)
        except FileExistsError:  # in workers that were started again
            return
        if self.stop.how == "an error":
            raise StopError(hook)
        os.kill(os.getpid(), getattr(signal, self.stop.how))

    def teardown(self, trainer, module, stage):
        self.note("teardown")
        calls_file(self.folder, trainer.global_rank).write_text(" ".join(self.calls))


def calls_file(folder, rank):
    """Return the file of the hooks that were called on a rank, in a run that has come to its end."""
    return folder / f"{rank}.calls"


def make_hook(name):
    """Return a hook that notes its call."""
    return lambda self, *_, **__: self.note(name)


for each in HOOKS:
    setattr(Stopping, each, make_hook(each))


def program_of(seed):
    """Return the program of a seed, which saves checkpoints and logs no durations; no hook ends its run."""
    program = Program.drawn(seed)
    names = dict.fromkeys(("checkpoints", *program.callbacks))
    chosen = tuple(name for name in names if name not in ("throughput", "devices"))
    return replace(program, callbacks=chosen, last_epoch=None)


def run(seed, layout, folder, stop, data_ranks):
    """Return how a program ends that goes on from its last checkpoint, with micro-batches of so many data ranks."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    program = program_of(seed)
    seed_everything(seed, verbose=False)
    module, stopping, logger = module_of(program), Stopping(stop, folder), CSVLogger(folder, "csv", version=0)
    named = list(callbacks_of(program, folder, data_ranks).items())
    named.insert(len(named) if stop is None else stop.place, ("noting", stopping))
    callbacks = dict(named)
    trainer = trainer_of(program, layout, folder, data_ranks, callbacks, [Counting()], logger)
    fit(trainer, module, program, "last", data_ranks)
    is_started = layout in LAUNCHED
    return End(
        copied(module.state_dict() if is_started else whole_state(trainer, module)),
        curve(folder) if trainer.is_global_zero else [],
        [] if is_started else module.rates,
        (trainer.global_step, trainer.current_epoch),
        {name: float(value) for name, value in trainer.callback_metrics.items()},
        kept_by(callbacks["checkpoints"]),
    )


def curve(folder):
    """Return the step and name of each value in the logger's file, and the value."""
    path = folder / "csv" / "version_0" / "metrics.csv"
    if not path.exists():
        return []
    with path.open() as file:
        rows = [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]
    told = [row for row in rows if not any(name.startswith(OF_ELASTIC_RUNS) for name in row)]
    return rows_of(((int(row["step"]), name), value) for row in told for name, value in row.items() if name != "step")


def started(seed, layout, folder, stop=None, begun_in=None):
    """Return the end of a run, and the calls of hooks on each rank; if it has failed, None and the error's text."""
    number, data_ranks = 1 if layout in LAUNCHED else LAYOUTS[layout].processes, data_ranks_of(begun_in or layout)
    folder.mkdir(exist_ok=True)
    try:
        if number > 1 or not (layout in LAUNCHED or stop is None or stop.how == "an error"):
            end = run_ranks(run, number, seed, layout, folder, stop, data_ranks, timeout=120)[0]
        else:
            end = run(seed, layout, folder, stop, data_ranks)
    except (Exception, SystemExit):  # noqa: BLE001 - it is compared with what was to end the run
        return None, traceback.format_exc()
    ranks = range(2 if layout in LAUNCHED else number)
    return end, [calls_file(folder, rank).read_text().split() for rank in ranks]


def compare(seed, layouts, folder):
    """Return what is not alike in an undisturbed run of a program and in one that is stopped, and where it was.

    Args:
        seed: that of the program.
        layouts: that of the first start, which the undisturbed run has too, and of each later one.
        folder: an empty folder.
    """
    first, *_ = layouts
    draw, stops = random.Random(f"{seed} {first}"), []
    undisturbed, calls = started(seed, first, folder / "undisturbed")
    if undisturbed is None:
        return stops, [] if any(said in calls for said in REFUSALS) else [calls]
    for layout in layouts:
        if not [*folder.glob("stopped/checkpoints/epoch*")]:
            begun_in = layout
        stop = None if len(stops) == len(layouts) - 1 else Stop.drawn(draw, calls)
        stops.append(stop)
        end, error = started(seed, layout, folder / "stopped", stop, begun_in)
        if end is None and layout != first and any(said in error for said in REFUSALS):
            return stops, []
        if end is None and not (stop is not None and any(said in error for said in ENDS[stop.how])):
            return stops, [error]
    return stops, compare_ends(undisturbed, end, program_of(seed), is_alike=len({*layouts}) == 1)


def compare_ends(undisturbed, end, program, *, is_alike):
    """Return what is not alike in the end of an undisturbed run, and in that of one that was stopped and went on.

    Args:
        undisturbed: how the former ends.
        end: how the latter ends.
        program: what was trained.
        is_alike: they are compared to the bit, as in one layout.
    """
    # the first step that was trained last has one call more where reading tells the end
    first = end.rates[0][0][0] if end.rates else math.inf
    for one in (undisturbed, end):
        one.rates = [row for row in one.rates if row[0][0] > first]
        # another name where a signal has saved the last step of an epoch before its end was read
        names, best = one.saved
        one.saved = [name.replace("-v1", "") for name in names], best.replace("-v1", "")
    if not (undisturbed.rates and end.rates):  # one was in processes that the trainer has started
        undisturbed.rates = end.rates = []
    if program.save_last is not True:  # what a signal has saved stays until something newer is saved
        names, best = end.saved
        more = [name for name in names if name not in undisturbed.saved[0]]
        if len(more) <= 2:  # with a link to it
            end.saved = [name for name in names if name not in more], "" if best in more else best
    weights = undisturbed.weights.items() if is_alike else ()
    bits = [name for name, value in weights if not torch.equal(value, end.weights[name])]
    return [*differences(undisturbed, end), *(f"{name} has other bits" for name in bits)]


def drawn_layouts(seed):
    """Return the layouts in which a program is started in turn."""
    return tuple(random.Random(f"layouts {seed}").choices([*LAYOUTS, *LAUNCHED], k=STARTS))


def main():
    """Compare programs, print each difference with what was drawn, and return the exit code."""
    parser = make_parser(__doc__, LAYOUTS | LAUNCHED, "single")
    parser.add_argument("--in-turn", action="store_true", help="draw another layout for each start")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    number = 0
    for seed in range(options.first, options.first + options.number):
        turns = (
            [drawn_layouts(seed)]
            if options.in_turn
            else [(layout,) * STARTS for layout in options.layouts or ["single"]]
        )
        for layouts in turns:
            if any(map(program_of(seed).is_left_out, layouts)):
                continue
            with tempfile.TemporaryDirectory() as folder:
                stops, said = compare(seed, layouts, Path(folder))
            if said:
                number += 1
                print(f"{program_of(seed)}\n{layouts}:", *stops, *said, sep="\n  ", flush=True)
    print(f"{options.number} drawn: {number} ends differ from an undisturbed run")
    return 1 if number else 0


if __name__ == "__main__":
    sys.exit(main())
