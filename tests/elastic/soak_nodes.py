"""A soak: a run on two nodes, each in its own network namespace, that goes through random faults and is then compared.

Usage: soak_nodes.py [--minutes 30] [--inner ddp] [--seed 0]; needs root, for network namespaces, and a C compiler. Half
of the time the store is on the node of rank 0, half on the other. Prints each fault, and for how long the run stood
still beyond it. Fails if that was longer than --bound seconds, if a program ended that should not have, if a sample is
lost or comes twice, if the curve is not that of an undisturbed run of as many steps, or if anything is left over.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "helpers"))

from elastic_nodes import Nodes, Undisturbed, curve, nodes_of_a_run, sweep
from elastic_program import STEPS_OF_EPOCH, Plan, write
from node_faults import KINDS, Adversary, Fault, NodeClock
from two_nodes import Node, running, two_nodes


@dataclass(frozen=True)
class Pause:
    """The longest time between two steps from one fault to the next, without the time in which faults lasted."""

    fault: Fault
    seconds: float


def pauses(faults: Sequence[Fault], moments: Sequence[float]) -> list[Pause]:
    """Return the pause of each fault, given when steps were done."""
    found = []
    for fault, following in itertools.zip_longest(faults, faults[1:]):
        until = float("inf") if following is None else following.begin
        gaps = [gap for gap in itertools.pairwise(moments) if gap[1] > fault.begin and gap[0] < until]
        found.append(Pause(fault, max((_without(gap, faults) for gap in gaps), default=0.0)))
    return found


def _without(gap: tuple[float, float], faults: Sequence[Fault]) -> float:
    """Return the seconds of a gap in which no fault lasted; faults come one after another."""
    begin, end = gap
    return end - begin - sum(max(0.0, min(end, fault.end) - max(begin, fault.begin)) for fault in faults)


def table(found: Sequence[Pause]) -> str:
    """Return the pauses of each kind of fault as a table, and the longest ones one by one."""
    rows = [f"{'fault':14}{'times':>6}{'lasted s':>10}{'paused beyond it s':>20}{'longest':>9}"]
    for kind in ("join", *KINDS):
        of_kind = [one for one in found if one.fault.kind == kind]
        if of_kind:
            lasted = statistics.median(one.fault.end - one.fault.begin for one in of_kind)
            paused = [one.seconds for one in of_kind]
            rows.append(f"{kind:14}{len(of_kind):6d}{lasted:10.1f}{statistics.median(paused):20.2f}{max(paused):9.2f}")
    every = [one.seconds for one in found]
    rows.append(f"{'all':14}{len(every):6d}{'':10}{statistics.median(every):20.2f}{max(every):9.2f}")
    longest = sorted(found, key=lambda one: one.seconds, reverse=True)[:5]
    return "\n".join([*rows, *(f"{one.seconds:.1f} s after {one.fault}" for one in longest)])


def soak(folder: Path, namespaces: Sequence[Node], options: argparse.Namespace, seconds: float) -> list[Pause]:
    """Let a run suffer, compare it, and return its pauses."""
    os.environ["TMPDIR"] = str(temporary := folder / "temporary")
    temporary.mkdir(parents=True)
    plan = Plan(
        epochs=1 << 20,
        strategy=options.inner,
        snapshot_every=options.snapshot_every,
        checkpoint_every=500,
        pause=options.pause,
        max_restarts=1 << 20,
    )
    clocks = [NodeClock(folder / f"clock_{slot}") for slot in range(2)]
    variables = [clock.variables for clock in clocks]
    with nodes_of_a_run(folder, plan, namespaces, variables=variables) as nodes:
        drawn = {"seed": options.seed, "patience": options.patience, "longest": options.longest}
        adversary = Adversary(nodes, clocks, **drawn)
        adversary.wait_until_settled()
        end = time.monotonic() + seconds
        for kind in itertools.count() if options.kinds is None else options.kinds:
            adversary.befall(kind if options.kinds else adversary.draw())
            adversary.rest()
            if options.kinds is None and time.monotonic() > end:
                break
        adversary.wait_until_settled()
        write(folder / "last", str(adversary.course.steps[-1][2]))
        weights = nodes.finish(*adversary.running.values())
        check_nothing_is_left(nodes, temporary, options.patience)
    told = "".join(log.read_text() for log in folder.glob("*.log"))
    assert "must belong to one run" not in told, "workers of a lost node have kept the lock of the checkpoints"
    found = pauses(adversary.faults, [moment for moment, _, _ in adversary.course.steps])
    print(table(found), flush=True)
    redone = adversary.course.redone()
    print(f"programs that lost the store: {adversary.num_lost}; steps done again: {redone}", flush=True)
    rounds = [number for _, number, _ in adversary.course.steps]
    num_late = sum(later < earlier for earlier, later in itertools.pairwise(rounds))
    assert num_late <= 1, "the workers of two rounds have trained at once"  # one may be stopped while it writes a line
    steps = curve(folder / "csv" / "version_0")[-1][0]
    undisturbed = Undisturbed.run(folder / "undisturbed", -(-steps // STEPS_OF_EPOCH), steps=steps)
    difference = nodes.check_no_scar(weights, undisturbed)
    print(f"the curve of {steps} steps differs from that of an undisturbed run by {difference:.1e}", flush=True)
    return found


def check_nothing_is_left(nodes: Nodes, temporary: Path, patience: float) -> None:
    """Wait for the end of the store, and look for leftovers."""
    end = time.monotonic() + patience
    while left := running(nodes.mark):
        assert time.monotonic() < end, f"processes are left: {left}"
        time.sleep(0.1)
    sweep()
    # torch's, and Python's of a fork server whose agent was killed, with an empty socket
    others = ("torchinductor_", "pymp-")
    files = [path.name for path in temporary.iterdir() if not path.name.startswith(others)]
    assert not files, f"files are left: {files}"


def main(words: Sequence[str] | None = None) -> None:
    """Soak twice, and check the pauses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--inner", default="ddp", help="ddp, fsdp")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="these faults, once each, instead of random ones")
    parser.add_argument("--stores", nargs="+", type=int, default=(0, 1), help="the nodes that have the store in turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=12.0, help="seconds that a fault may last")
    parser.add_argument("--snapshot-every", type=int, help="steps; by default as often as costs less than 1%%")
    parser.add_argument("--pause", type=float, default=0.03, help="seconds by which each step takes longer")
    parser.add_argument("--bound", type=float, default=15.0, help="seconds beyond a fault in which the run goes on")
    parser.add_argument("--patience", type=float, default=240.0, help="seconds without a step that are a hang")
    parser.add_argument("--keep", type=Path, help="a folder that stays")
    options = parser.parse_args(words)
    found = []
    with tempfile.TemporaryDirectory() as place:
        folder = options.keep or Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        NodeClock.preload(folder)
        for store in options.stores:
            with two_nodes() as nodes:
                of_turn = [nodes[store], nodes[1 - store]]
                print(f"the store is on {of_turn[0].address}", flush=True)
                seconds = options.minutes * 60 / len(options.stores)
                found += soak(folder / f"store_{store}", of_turn, options, seconds)
            assert not any(Path("/run/netns", node.namespace).exists() for node in nodes)
            options.seed += 1
    print(table(found), flush=True)
    late = [one for one in found if one.seconds > options.bound]
    assert not late, f"the run stood still for longer than {options.bound} s beyond {len(late)} faults"
    print("no scar", flush=True)


if __name__ == "__main__":
    main()
