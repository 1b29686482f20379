"""Runs on S3 that are killed at random moments until they are through; also a program, which does so 100 times.

Usage: kills.py FOLDER [KILLS]; starts a server of its own, and raises at the first thing that is lost.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1] / "helpers"))

from programs import ForkedProgram
from server import environment, make_bucket, s3_server
from store_program import STEPS, main

from echelon.common.storage import as_path
from echelon.trainer.checkpoint import list_checkpoints, verify

PROGRAM = os.path.join(os.path.dirname(__file__), "store_program.py")
PATIENCE = 300.0


def kill_until_through(folder: str, server: str, out: Path, *, kills: int, seed: int = 0, steps: int = STEPS) -> int:
    """Train in a folder of a store, in a process that is killed up to `kills` times; check what is there after each.

    Returns:
        The number of kills that hit a run.
    """
    chance, hits, code = random.Random(seed), 0, 1
    (out / "peace").mkdir()
    main(str(out / "peace" / "checkpoints"), out / "peace", steps)
    while code:
        (out / "begun").unlink(missing_ok=True)
        environ = {**os.environ, **environment(server), "OMP_NUM_THREADS": "1"}
        program = ForkedProgram([PROGRAM, folder, out, str(steps)], folder=out, environ=environ, output=out / "log")
        try:
            end = time.monotonic() + PATIENCE
            while program.poll() is None and not (out / "begun").exists():
                assert time.monotonic() < end, (out / "log").read_text()
                time.sleep(0.01)
            if hits < kills:
                time.sleep(chance.uniform(0.0, 1.2))
                if program.poll() is None:
                    program.kill()
                    hits += 1
            code = program.wait(PATIENCE)
        finally:
            if program.poll() is None:
                program.kill()
        assert code <= 0, (out / "log").read_text()
        for found in list_checkpoints(folder):  # what is listed is complete
            verify(found.path)
    _check(folder, out, steps)
    return hits


def _check(folder: str, out: Path, steps: int) -> None:
    """Check that the weights are those of an undisturbed run, and that retention holds to the object."""
    ours, theirs = torch.load(out / "weights.pt"), torch.load(out / "peace" / "weights.pt")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    names = [found.path.name for found in list_checkpoints(folder)]
    assert [name.partition("step=")[2] for name in names] == [f"{steps - 2}.ckpt", f"{steps}.ckpt"]
    places = as_path(folder).find()
    assert {place.parts[3] for place in places} == {*names, "last.ckpt", ".newest"}
    assert len(places) == 2 + sum(len(verify(as_path(folder) / name).files) + 2 for name in names)


def soak(out: Path, kills: int) -> None:
    """Kill runs of a hundred steps each, ten times, until there were so many kills."""
    out.mkdir(parents=True, exist_ok=True)
    total, began = 0, time.monotonic()
    with s3_server() as server:
        os.environ.update(environment(server))
        make_bucket(server, "soak")
        number = 0
        while total < kills:
            folder = out / f"{number}"
            folder.mkdir()
            goal = min(10, kills - total)
            total += kill_until_through(f"s3://soak/{number}", server, folder, kills=goal, seed=number, steps=60)
            number += 1
            print(f"{total} kills in {number} runs and {time.monotonic() - began:.0f} s: nothing was lost", flush=True)


if __name__ == "__main__":
    soak(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 100)
