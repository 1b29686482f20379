"""A soak: an elastic run with a random fault every few seconds, watched from outside and then compared.

Usage: soak.py [--minutes 15] [--inner fsdp] [--every 5 10] [--actions kill stop] [--seed 0]. Prints what the
faults were, how long the run took to go on after each, and what grew; fails if anything hung, grew, or was left over,
or if the curve is not that of an undisturbed run of as many steps.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import torch

FAULTS = Path(__file__).parent
sys.path += [str(FAULTS), str(FAULTS.parent / "helpers")]

from programs import ForkedProgram  # noqa: E402 - they lie beside this file
from soak_holdings import (  # noqa: E402
    MARK,
    Sample,
    names,
    node_folders,
    parent,
    processes_of,
    shared_files,
    take_sample,
    text,
)

from echelon import Chaos  # noqa: E402
from echelon.callbacks.samples.audit import audit_ledger, samples_folder  # noqa: E402

PROGRAM: Final = FAULTS / "soak_program.py"
EXACT: Final = 1e-12
_SETTLED: Final = 10
"""Steps that count as two snapshots where the run chooses the interval itself, by what a snapshot costs."""
ACTIONS: Final = ("kill", "stop", "exit", "raise", "hang")
MAY_GROW: Final = Sample(6.0, 6.0, 0, 0, 0, 0, 512.0, 4)
"""From the first half of the rounds to the last quarter; in memory the list of the rounds grows."""


@dataclass
class Seen:
    """What was seen of a run."""

    faults: list[tuple[float, str]] = field(default_factory=list)
    """The time and the kind."""
    samples: dict[int, list[Sample]] = field(default_factory=dict)
    """By round, from when it has taken its first snapshots."""
    steps: list[tuple[float, int, int]] = field(default_factory=list)
    """When rank 0 completed a step, the round, and the step's number."""

    def note(self, lines: list[str]) -> bool:
        """Read what the program has written about its steps; return whether there is anything new."""
        for moment, number, step in map(str.split, lines):
            self.steps.append((float(moment), int(number), int(step)))
        return bool(lines)

    def round_that_has_done(self, num_steps: int) -> int | None:
        """Return the running round once it has done this many steps: by then it has opened all that it ever opens."""
        number = self.steps[-1][1]
        return number if sum(each == number for _, each, _ in self.steps) > num_steps else None

    def recoveries(self) -> list[tuple[str, float]]:
        """Return the kind of each fault, and the seconds from there to the first step of the next workers."""
        found = []
        for moment, kind in self.faults:
            round_then = max((number for when, number, _ in self.steps if when <= moment), default=-1)
            later = [when for when, number, _ in self.steps if number > round_then and when > moment]
            if later:
                found.append((kind, later[0] - moment))
        return found

    def redone(self) -> list[int]:
        """Return how many steps were repeated after each return to an earlier one."""
        pairs = itertools.pairwise(self.steps)
        return [before + 1 - step for (_, one, before), (_, other, step) in pairs if one != other]

    def quarters(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the most that the run held in the first half of its rounds, and the least in the last quarter.

        What grows exceeds all earlier values. What comes and goes, like a file that is open briefly, does not.
        """
        rounds = [self.samples[number] for number in sorted(self.samples)]
        early = itertools.chain(*rounds[: max(1, len(rounds) // 2)])
        late = itertools.chain(*rounds[-max(1, len(rounds) // 4) :])
        return _each(max, early), _each(min, late)


def _each(choose: Callable[[Iterable[float]], float], samples: Iterable[Sample]) -> dict[str, float]:
    kept = list(samples)
    return {one.name: choose(getattr(sample, one.name) for sample in kept) for one in fields(Sample)}


@contextlib.contextmanager
def started(folder: Path, plan: dict[str, Any], mark: str, seen: Seen) -> Iterator[ForkedProgram]:
    """Run the program; nothing of it is left at the end. Notes the faults that it reports."""
    (folder / "temporary").mkdir(parents=True, exist_ok=True)
    log, has_ended = folder / "log", threading.Event()
    log.touch()
    environ = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "temporary")}
    process = ForkedProgram([PROGRAM, folder, json.dumps(plan)], folder=folder, environ=environ, output=log)

    def listen() -> None:
        with log.open() as lines:
            is_last, line = False, ""
            while not is_last:
                is_last = has_ended.wait(0.01)
                while part := lines.readline():
                    line += part
                    if not line.endswith("\n"):
                        break  # the rest is still to come
                    if found := re.match(r"Chaos: (\w+):", line):
                        seen.faults.append((time.time(), found[1]))
                    line = ""

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        yield process
    finally:
        for one in processes_of(process.pid, mark):
            if "resource_tracker" not in text(Path(f"/proc/{one}/cmdline")):  # it cleans up after the others
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)
        process.wait()
        has_ended.set()
        listener.join()


def watch(folder: Path, plan: dict[str, Any], seconds: float, patience: float) -> Seen:
    """Inject faults into a run for this long, and at least one; return what was seen of it once it has ended.

    Raises:
        AssertionError: if it came no further for `patience` seconds, failed, or left anything.
    """
    seen, mark = Seen(), uuid.uuid4().hex
    (folder / "temporary").mkdir(parents=True)
    (folder / "steps").touch()
    with started(folder, plan, mark, seen) as process, (folder / "steps").open() as course:
        files: set[Path] = set()
        begun, moved = None, time.monotonic()
        while process.poll() is None:
            time.sleep(1.0)
            family = processes_of(process.pid, mark)
            files |= shared_files(family)
            if seen.note(course.readlines()):
                moved = time.monotonic()
                begun = begun or moved
            assert time.monotonic() < moved + patience, f"it hangs:\n{where(family)}\n{tail(folder)}"
            if begun is None or (folder / "last").exists():
                continue
            if time.monotonic() > begun + seconds and seen.faults:
                write(folder / "last", str(max(step for _, _, step in seen.steps)))
            elif (
                number := seen.round_that_has_done(2 * plan["snapshot_every"] if plan["snapshot_every"] else _SETTLED)
            ) is not None:
                seen.samples.setdefault(number, []).append(take_sample(process.pid, mark, folder / "temporary"))
        seen.note(course.readlines())
        assert process.returncode == 0, f"it ended with {process.returncode}:\n{tail(folder)}"
        check_nothing_is_left(process.pid, mark, files, folder)
    return seen


def write(path: Path, content: str) -> None:
    """Write a small file that others read meanwhile."""
    (part := path.with_name(f"{path.name}.part")).write_text(content)
    part.rename(path)


def check_nothing_is_left(agent: int, mark: str, files: set[Path], folder: Path) -> None:
    end = time.monotonic() + 40  # the fork server and the tracker of resources end when they see that the agent has
    while (family := processes_of(agent, mark)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not family, f"processes are left:\n{where(family)}"
    own = [name for name in names(folder / "temporary") if not name.startswith("torchinductor_")]  # torch's, for good
    left = [*node_folders(agent), *(path for path in files if path.exists()), *own]
    assert not left, f"files are left: {[str(one) for one in left]}"


def where(pids: set[int]) -> str:
    """Say of processes what they are."""
    lines = []
    for one in sorted(pids):
        if stat := text(Path(f"/proc/{one}/stat")):
            command = text(Path(f"/proc/{one}/cmdline")).replace("\0", " ")
            lines.append(f"{one} ({stat.rpartition(')')[2].split()[0]}), of {parent(one)}: {command[-80:]}")
    return "\n".join(lines)


def tail(folder: Path) -> str:
    return text(folder / "log")[-6000:]


# --- the comparison --------------------------------------------------------------------------------------------------


def check_curve(folder: Path, plan: dict[str, Any]) -> tuple[int, float]:
    """Compare the curve of a run, its weights and its samples with an undisturbed one; return steps and difference."""
    found = curve(folder)
    steps = found[-1][0]
    lost = sorted(set(range(1, steps + 1)) - {step for step, _ in found})
    assert not lost and len(found) == steps, f"the curve lacks {len(lost)} steps: {lost[:10]} ..."
    peace = folder / "peace"
    with started(peace, {**plan, "chaos": "", "pause": 0.0, "steps": steps}, uuid.uuid4().hex, Seen()) as process:
        assert process.wait() == 0, tail(peace)
    expected = curve(peace)
    assert [step for step, _ in expected] == list(range(1, steps + 1))
    difference = max(abs(one - other) for (_, one), (_, other) in zip(found, expected, strict=True))
    assert difference <= EXACT, f"the curves differ by {difference:.1e}"
    ours, theirs = (torch.load(run / "weights.pt") for run in (folder, peace))
    assert all(torch.allclose(ours[name], theirs[name], rtol=0, atol=EXACT) for name in theirs)
    samples = audit_ledger(samples_folder(folder / "csv" / "version_0"))
    assert samples.is_exact, samples
    return steps, difference


def curve(folder: Path) -> list[tuple[int, float]]:
    """Return the logged losses by step, as in the only file."""
    [file] = (folder / "csv").glob("version_*/metrics.csv")
    with file.open() as lines:
        return [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(lines) if row["loss"]]


def report(seen: Seen) -> str:
    """Say what was seen."""
    recoveries, redone = seen.recoveries(), seen.redone()
    rows = [f"{seen.steps[-1][2]} steps in {seen.steps[-1][1] + 1} rounds", ""]
    rows.append(f"{'fault':12}{'times':>8}{'recovery s':>12}{'longest':>10}")
    for kind, count in Counter(kind for _, kind in seen.faults).items():
        seconds = [taken for name, taken in recoveries if name == kind] or [0.0]
        rows.append(f"{kind:12}{count:8d}{statistics.median(seconds):12.2f}{max(seconds):10.2f}")
    rows.append(f"steps done again: {sum(redone)}, at most {max(redone, default=0)} at a time")
    rows += ["", f"{'held':14}{'early':>14}{'late':>10}"]
    first, last = seen.quarters()
    rows += [f"{name:14}{first[name]:14.1f}{last[name]:10.1f}" for name in first]
    return "\n".join(rows)


def check_growth(seen: Seen) -> None:
    """See to it that nothing has grown.

    Raises:
        AssertionError: if anything has.
    """
    first, last = seen.quarters()
    grown = {
        name: f"{first[name]} -> {last[name]}" for name in first if last[name] - first[name] > getattr(MAY_GROW, name)
    }
    assert not grown, f"held by the run, early and late: {grown}"


def soak(folder: Path, options: argparse.Namespace) -> None:
    """Do all of it, and print the report."""
    plan = {
        "inner": options.inner,
        "chaos": str(Chaos.random(options.seed, tuple(options.every), options.actions)),
        "hang_timeout": options.hang_timeout,
        "snapshot_every": options.snapshot_every,
        "pause": options.pause,
        "steps": -1,
    }
    run = folder / "soak"
    seen = watch(run, plan, options.minutes * 60, options.patience)
    print(report(seen), flush=True)
    check_growth(seen)
    steps, difference = check_curve(run, plan)
    print(f"the curve of {steps} steps differs from that of an undisturbed run by {difference:.1e}")


def main(words: Sequence[str] | None = None) -> None:
    """Soak, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--inner", default="ddp", help="ddp, zero, fsdp")
    parser.add_argument("--every", type=float, nargs=2, default=(5.0, 10.0), help="seconds from fault to fault")
    parser.add_argument("--actions", nargs="+", default=ACTIONS, help="which faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hang-timeout", type=float, default=3.0, help="seconds that a step may take")
    parser.add_argument("--snapshot-every", type=int, help="steps; by default as often as costs less than 1%%")
    parser.add_argument("--pause", type=float, default=0.03, help="seconds by which each step takes longer")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds without a step that are a hang")
    parser.add_argument("--keep", type=Path, help="a folder that stays")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        soak(options.keep or Path(folder), options)


if __name__ == "__main__":
    main()
