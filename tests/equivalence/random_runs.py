"""Train programs drawn at random in each layout, and print what does not end as in one process.

Usage: python tests/equivalence/random_runs.py [--first SEED] [--number PROGRAMS] [layout ...]
"""

import argparse
import math
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "helpers"))

from random_programs import LAYOUTS, Program, run_all

from echelon.testing import run_ranks

REFUSALS = (
    "echelon.common.errors.ConfigError",
    "which replicas of strategy='dp' lose",
    "must have equal lengths to be cut into slices for several devices",
    "belongs to no child, or to several, and automatic_optimization=False",
)
"""What errors say of programs that a layout refuses by name."""


def main(about=__doc__, titles=LAYOUTS, kind=Program, run=run_all):
    """Compare programs, or loops, print each difference with what was drawn, and return the exit code."""
    options = make_parser(about, titles).parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    seeds = range(options.first, options.first + options.number)
    layouts = {layout: seeds for layout in options.layouts or titles if layout != "single"}
    number = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed, layout, said in compare(seeds, layouts, Path(folder), kind, run):
            number += 1
            print(f"{kind.drawn(seed)}\n{layout}:", *said, sep="\n  ", flush=True)
    print(f"{options.number} drawn, in {len(layouts)} layouts: {number} ends differ from one process")
    return 1 if number else 0


def make_parser(about, titles, default="all"):
    """Return a parser of layouts, of which the help names the default, and of which programs are drawn."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", help=f"any of {', '.join(titles)}; by default, {default}")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--number", type=int, default=100, help="how many are drawn")
    return parser


def compare(seeds, layouts, folder, kind=Program, run=run_all):
    """Yield a seed, the layout of a run and what is not alike, for each run that does not end as in one process.

    Each program also goes on from a checkpoint that it, or one process, has saved inside a run. Programs that a layout
    refuses by name are left out.

    Args:
        seeds: those of the programs.
        layouts: for each layout, the seeds of the programs that it trains.
        folder: an empty folder.
        kind: what is drawn.
        run: runs some of them in a process.
    """
    ends = run([(seed, made(folder, seed, "single"), None) for seed in seeds], "single")
    one = dict(zip(seeds, ends, strict=True))
    yield from ((seed, "single", [end.error]) for seed, end in one.items() if end.error is not None)
    for layout, chosen in {"single": seeds, **layouts}.items():
        jobs = []
        for seed in chosen:
            drawn = kind.drawn(seed)
            if drawn.is_left_out(layout):
                continue
            if one[seed].error is None and layout != "single":
                jobs.append((seed, made(folder, seed, layout), None))
            if one[seed].error is None and drawn.stop < one[seed].counters[0]:
                jobs.append((seed, made(folder, seed, f"{layout}, resumed"), saved_by(folder, seed, layout)))
        yield from _compared(one, layout, jobs, ends_on(layout, jobs, run), kind)


def _compared(one, layout, jobs, ends, kind):
    for (seed, _, checkpoint), end in zip(jobs, ends, strict=True):
        is_refused = end.error is not None and any(said in end.error for said in REFUSALS)
        if is_refused or not (checkpoint is None or checkpoint.exists()):
            continue  # and where a layout has refused a program, it has saved nothing to go on from
        expected, title = one[seed], layout
        if checkpoint is not None:
            stop = kind.drawn(seed).stop
            expected, end, title = expected.after(stop), end.after(stop), f"{layout}, resumed from {checkpoint}"
        if said := differences(expected, end):
            yield seed, title, said


def ends_on(layout, jobs, run, together=16):
    """Return the ends of runs in a layout, on its first rank."""
    number, ends = LAYOUTS[layout].processes, []
    if number == 1:
        return run(jobs, layout)
    for start in range(0, len(jobs), together):
        ends += run_ranks(run, number, jobs[start : start + together], layout, timeout=300)[0]
    return ends


def made(folder, seed, title):
    """Return a new folder for a run."""
    path = folder / str(seed) / title
    path.mkdir(parents=True)
    return path


def saved_by(folder, seed, layout):
    """Return the checkpoint from which a run goes on: its layout's own or, for every second seed, one process's."""
    return folder / str(seed) / (layout if seed % 2 else "single") / "stopped.ckpt"


def differences(expected, found):
    """Return what is not alike in two ends, in words."""
    if found.error is not None:
        return [found.error]
    said = [
        f"{name}: {one} and {other}"
        for name in ("counters", "saved")
        if (one := getattr(expected, name)) != (other := getattr(found, name))
    ]
    for name in ("weights", "metrics"):
        one, other = getattr(expected, name), getattr(found, name)
        if one.keys() != other.keys():
            said.append(f"{name} in one place only: {one.keys() ^ other.keys()}")
        elif far := [key for key, value in one.items() if not is_close(value, other[key])]:
            said.append(f"{name}: {far}, such as {one[far[0]]} and {other[far[0]]}")
    for name in ("rows", "rates"):
        one, other = getattr(expected, name), getattr(found, name)
        keys = [Counter(key for key, _ in values) for values in (one, other)]
        if keys[0] != keys[1]:
            said.append(f"{name} in one process only: {[*(keys[0] - keys[1])]}; here only: {[*(keys[1] - keys[0])]}")
        elif far := [(a, b[1]) for a, b in zip(one, other, strict=True) if not is_close(a[1], b[1])]:
            said.append(f"{name}: {far[:3]} of {len(far)}")
    return said


def is_close(one, other):
    """Return whether numbers or tensors differ by rounding only."""
    if isinstance(one, torch.Tensor):
        return (one - other).abs().max().item() < 1e-10
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-10) or (math.isnan(one) and math.isnan(other))


if __name__ == "__main__":
    sys.exit(main())
