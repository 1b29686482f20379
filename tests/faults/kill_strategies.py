"""Kills runs of every strategy at any moment, resumes each, and compares all with an undisturbed run.

Usage: kill_strategies.py FOLDER [--kills 30] [--layouts ddp fsdp ...] [--seed 0]. What is killed is a rank, the caller
(of an elastic run: its agent), or all processes at once. Prints where each kill landed.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import signal
import sys
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

FAULTS = Path(__file__).parent
sys.path += [str(FAULTS), str(FAULTS.parent / "helpers")]

from forked_server import MARK  # noqa: E402 - they lie beside this file
from kill_anywhere import check_checkpoints, compare_weights_and_kept, entries  # noqa: E402
from kill_program import EPOCHS, LAYOUTS, STEPS_OF_EPOCH  # noqa: E402
from programs import ForkedProgram  # noqa: E402
from two_nodes import kill_marked, running  # noqa: E402

from echelon.callbacks.samples.audit import audit_ledger, samples_folder  # noqa: E402

PATIENCE = 300.0  # seconds after which a run hangs
WITHIN = 2.0  # seconds after the first step in which a kill lands; of a run without kills, 24 steps and the end


@dataclass
class Run:
    """A run in its folder, which is restarted after each kill, and what it was doing when killed."""

    folder: Path
    layout: str
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def begin(self) -> ForkedProgram:
        """Start the program, which continues from the last checkpoint."""
        (self.folder / "temporary").mkdir(parents=True, exist_ok=True)
        (self.folder / "ranks").unlink(missing_ok=True)
        environ = {**os.environ, MARK: self.mark, "TMPDIR": str(self.folder / "temporary"), "OMP_NUM_THREADS": "1"}
        words = [FAULTS / "kill_program.py", self.folder, self.layout]
        return ForkedProgram(words, folder=self.folder, environ=environ, output=self.folder / "log")

    def ranks(self, program: ForkedProgram) -> list[int]:
        """Return the processes of the ranks once they train; none if the program has ended."""
        end = time.monotonic() + PATIENCE
        while program.poll() is None:
            assert time.monotonic() < end, f"no step within {PATIENCE:g} s\n{self.told()}"
            if (self.folder / "ranks").exists():
                found: list[int] = json.loads((self.folder / "ranks").read_text())
                return found
            time.sleep(0.01)
        return []

    def told(self) -> str:
        """Return the end of what the program has written."""
        return (self.folder / "log").read_text()[-4000:]

    def is_saving(self) -> bool:
        """Return whether a checkpoint was being written, or removed."""
        return any(name.startswith(".") and name.endswith((".new", ".gone")) for name in entries(self.folder))

    def end(self, program: ForkedProgram) -> int:
        """Wait for the end of the program and of everything that it has started."""
        code = program.wait(PATIENCE)
        end = time.monotonic() + PATIENCE
        while running(self.mark):
            assert time.monotonic() < end, f"left behind: {running(self.mark)}\n{self.told()}"
            time.sleep(0.02)
        return code


def kill(run: Run, program: ForkedProgram, chance: random.Random) -> str:
    """Kill a part of a run at some time; return where it landed, or "" if the program had ended before."""
    victim = chance.choice(["rank", "caller", "all"])
    ranks = run.ranks(program)
    wait_until = time.monotonic() + chance.uniform(0.0, WITHIN)
    waits_for_a_save = chance.random() < 0.5
    while program.poll() is None and time.monotonic() < wait_until and not (waits_for_a_save and run.is_saving()):
        time.sleep(0.001)
    if program.poll() is not None:
        return ""
    where = "while it saves" if run.is_saving() else "between saves"
    (run.folder / "ranks").unlink(missing_ok=True)
    if victim == "all":
        kill_marked(run.mark)
    else:
        pid = chance.choice(ranks) if victim == "rank" else program.pid
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return ""
    return f"{victim}, {where}"


def kill_until_it_ends(run: Run, chance: random.Random, landed: Counter[str], most: int) -> None:
    """Kill and resume a run until it ends, at most this many times in all; the last run is left alive."""
    program = run.begin()
    while True:
        where = "" if landed.total() >= most else kill(run, program, chance)
        if where:
            landed[where] += 1
            print(f"{run.layout}: {landed.total()}: {run.folder.name}, {where}", flush=True)
            is_replaced = run.layout.startswith("elastic") and where.startswith("rank")
            if is_replaced and program.poll() is None:
                continue  # the run continues on its own
        code = run.end(program)
        check_checkpoints(run.folder)
        if code == 0:
            return
        assert where, f"it ended with exit code {code} by itself\n{run.told()}"
        program = run.begin()


def compare(war: Path, peace: Path) -> None:
    """Weights, curve, samples and what is kept are those of the undisturbed run."""
    compare_weights_and_kept(war, peace)
    ours, theirs = curve(war), curve(peace)
    assert ours == theirs, f"the curves differ: {sorted(set(ours) ^ set(theirs))}"
    assert len(theirs) == EPOCHS * (STEPS_OF_EPOCH + 1)
    found = audit_ledger(samples_folder(war / "csv" / "version_0"))
    assert found.is_exact, found
    assert len(found.epochs) == EPOCHS
    left = [path.name for path in (war / "temporary").iterdir()]
    assert not left, f"temporary files are left: {left}"


def curve(folder: Path) -> list[tuple[str, ...]]:
    """Return the step and the losses of each row that has some; an elastic run logs times as well."""
    with (folder / "csv" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    losses = sorted(name for name in rows[0] if name.startswith("loss"))
    return [(row["step"], *(row[name] for name in losses)) for row in rows if any(row[name] for name in losses)]


def soak(folder: Path, layout: str, kills: int, seed: int) -> Counter[str]:
    """Kill runs of a layout this many times; return where."""
    chance, landed = random.Random(f"{layout} {seed}"), Counter[str]()
    peace = Run(folder / layout / "peace", layout)
    assert peace.end(peace.begin()) == 0, peace.told()
    number = 0
    while landed.total() < kills:
        war = Run(folder / layout / f"war{number}", layout)
        try:
            kill_until_it_ends(war, chance, landed, kills)
            compare(war.folder, peace.folder)
        finally:
            kill_marked(war.mark)
        number += 1
    return landed


def main() -> None:
    """Kill runs of each layout, and say where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=30, help="of each layout")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for layout in options.layouts:
        began = time.monotonic()
        landed = soak(options.folder.resolve(), layout, options.kills, options.seed)
        print(f"{layout}: {landed.total()} kills, {time.monotonic() - began:.0f} s: {dict(landed)}", flush=True)


if __name__ == "__main__":
    main()
