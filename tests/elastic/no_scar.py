"""A run that goes through kills, joins and leaves on two nodes, and is compared with an undisturbed one.

Usage: no_scar.py [--inner fsdp] [--kills 10] [--joins 3] [--leaves 3] [--seed 0]; needs root, for network namespaces.
The nodes have one and three workers, so that the run has one, three or four.
"""

from __future__ import annotations

import argparse
import itertools
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "helpers"))

from elastic_nodes import Nodes, Program, Undisturbed, curve, nodes_of, nodes_of_a_run
from elastic_program import STEPS_OF_EPOCH, Plan, write
from two_nodes import two_nodes

WORKERS = (1, 3)
"""Of the two nodes."""
_PAUSE = 5  # steps between two faults


def suffer(folder: Path, *, inner: str, kills: int, joins: int, leaves: int, seed: int = 0) -> None:
    """Let a run suffer, say what happens to it, and compare it with an undisturbed one.

    The first node to leave is asked to, the next one is lost, and so on.
    """
    drawn = random.Random(seed)
    faults = ["kill"] * kills
    drawn.shuffle(faults)
    changes = [kind for pair in itertools.zip_longest(["join"] * joins, ["leave"] * leaves) for kind in pair if kind]
    places = sorted(drawn.choices(range(kills + 1), k=len(changes)), reverse=True)
    for change, place in zip(reversed(changes), places, strict=True):
        faults.insert(place, change)
    with two_nodes() as namespaces:
        plan = Plan(epochs=1 << 20, strategy=inner)
        with nodes_of_a_run(folder, plan, namespaces) as nodes:
            nodes.hold_after(_PAUSE)
            running = {0: nodes.start(0, devices=WORKERS[0])}
            nodes.wait(lambda seen: seen["step"] >= _PAUSE, "the first steps are done")
            num_left = 0
            for fault in faults:
                print(_befall(nodes, running, fault, drawn, lost=num_left % 2 == 1), flush=True)
                num_left += fault == "leave"
                step = nodes.progress["step"] + _PAUSE
                nodes.hold_after(step)
                nodes.wait(lambda seen, step=step: seen["step"] >= step, "the run goes on")
            write(folder / "last", str(nodes.progress["step"]))
            weights = nodes.finish(*running.values())
    steps = curve(folder / "csv" / "version_0")[-1][0]
    undisturbed = Undisturbed.run(folder / "undisturbed", -(-steps // STEPS_OF_EPOCH), steps=steps)
    nodes.check_no_scar(weights, undisturbed)
    print(f"no scar after {steps} steps")


def _befall(nodes: Nodes, running: dict[int, Program], fault: str, drawn: random.Random, *, lost: bool) -> str:
    began, seen = time.monotonic(), nodes.progress
    if fault == "kill":
        rank = drawn.randrange(len(seen["workers"]))
        nodes.kill_worker(rank)
        fault += f" of rank {rank}"
    elif fault == "join":
        [slot] = {0, 1} - running.keys()
        running[slot] = nodes.come(slot, 2, devices=WORKERS[slot])
        fault += f" of {running[slot].name}"
    else:
        slot = drawn.choice(sorted(running))
        program = running.pop(slot)
        nodes.go(program, signal.SIGKILL if lost else signal.SIGTERM, 1)
        fault = f"{program.name} is lost" if lost else f"{program.name} leaves"
    now = nodes.progress
    return (
        f"step {seen['step']}, {len(seen['workers'])} workers: {fault}; after {time.monotonic() - began:.1f} s round "
        f"{now['round']} with {len(now['workers'])} workers on {nodes_of(now)} node(s)"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inner", default="ddp")
    for name, default in (("kills", 10), ("joins", 3), ("leaves", 3), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    with tempfile.TemporaryDirectory() as folder:
        suffer(Path(folder), **vars(parser.parse_args()))
