"""A program in which ranks take snapshots in memory, are killed at random moments, and others continue from there.

Run by test_take_snapshot.py in a process of its own: forking wants a process without threads, which has imported torch
once for all forks. Usage: killed_in_snapshot.py FOLDER ROUNDS; prints the step at which each round went on.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from echelon.strategies.snapshots.snapshots import MemorySnapshots
from echelon.strategies.state.optimizer_state import Sharded
from echelon.trainer.checkpoint import MemoryWriter, load

NODES = (0, 0, 1)


@dataclass
class Group:
    """What snapshots ask of the processes of a run."""

    rank: int
    world_size: int
    cpu_group: Any
    device_group: Any = None


def state_at(step: int, rank: int) -> dict[str, Any]:
    """Return the state of a step: a tensor that is whole on all ranks, and those that each rank owns."""
    own = {f"of-{rank}.{part}": torch.arange(50_000) * step + rank + part for part in range(3)}
    return {
        "model": {"whole": torch.full((100_000,), float(step))},
        "optimizers": [{"state": Sharded(own)}],
        "loop": {"step": step},
    }


def check(path: Path, step: int, rank: int) -> None:
    """Compare what this rank reads of a snapshot with the state of its step, bit by bit."""
    state, expected = load(path, lazy=("model", "optimizers"), verify=False), state_at(step, rank)
    assert state["loop"] == expected["loop"]
    assert torch.equal(state["model"]["whole"].clone(), expected["model"]["whole"])
    own = state["optimizers"][0]["state"]
    assert all(torch.equal(own[name].clone(), value) for name, value in expected["optimizers"][0]["state"].items())


def run_rank(folder: Path, round_: int, rank: int, pipe: int) -> None:
    """Continue from what there is, and take one snapshot after another until this process is killed."""
    store = dist.FileStore(str(folder / f"store-{round_}"), len(NODES))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(NODES))
    group: Any = Group(rank, len(NODES), dist.group.WORLD)
    snapshots = MemorySnapshots(folder / f"node-{NODES[rank]}", round_, group, NODES[rank])
    recovered = snapshots.agree()
    step = 0
    if recovered is not None:
        step = recovered.step
        check(recovered.path, step, rank)
    os.write(pipe, f"{step} ".encode())
    writer = MemoryWriter(snapshots)
    while True:
        step += 1
        writer.save(state_at(step, rank), step)
        if step % 2:
            writer.close()
            if not snapshots.is_broken:
                os.write(pipe, f"{step} ".encode())  # complete on all nodes


def fork(folder: Path, round_: int, rank: int) -> tuple[int, int]:
    """Start a rank; return its process id, and where it writes steps."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            run_rank(folder, round_, rank, writer)
        except BaseException:  # noqa: BLE001 - nothing of it may go on as the parent
            traceback.print_exc()
            time.sleep(60)  # the others also fail when one is killed; the parent ends them all
        os._exit(1)
    os.close(writer)
    return pid, reader


def main(folder: Path, rounds: int) -> None:
    """Run the rounds; each continues at least from the last snapshot completed before the previous kill."""
    chance = random.Random(0)
    complete, found = 0, []
    for round_ in range(rounds):
        ranks = [fork(folder, round_, rank) for rank in range(len(NODES))]
        begun = [os.read(reader, 100).split() for _, reader in ranks]
        steps = {int(words[0]) for words in begun if words}
        assert all(begun), f"a rank of round {round_} did not begin"
        assert len(steps) == 1, steps
        found.append(steps.pop())
        assert found[-1] >= complete, (found, complete)
        told = []
        for _ in range(chance.choice([0, 1, 1, 2, 3])):
            told += [int(word) for word in os.read(ranks[0][1], 100).split()]
        time.sleep(chance.uniform(0.0, 0.04))
        victims = chance.sample(ranks, len(ranks))
        for pid, _ in victims:
            os.kill(pid, signal.SIGKILL)
            time.sleep(chance.choice([0.0, 0.02]))
        for pid, _ in ranks:
            os.waitpid(pid, 0)
        told += [int(word) for _, reader in ranks for word in os.read(reader, 1 << 20).split()]
        complete = max([found[-1], *told])
        for _, reader in ranks:
            os.close(reader)
        if round_ % 3 == 2:  # a node is lost as well
            shutil.rmtree(folder / f"node-{chance.choice(NODES)}")
    print(*found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
