"""Staleness of a parameter server's async mode, and the time it saves when trainers have different speeds.

Run ``python benchmarks/staleness.py``. First, trainers wait a random time at each step; the most that any trainer was
ahead of the slowest is computed from nothing but the order of the rows in the ledger of all pushes.

Then one trainer takes twice as long for a step as the others. The others make twice the steps of sync mode until they
have used up a bound of k, after 2 k steps; then they go at its pace, a speedup of N / (N - k) over N steps: 1.6 at
8 k / 3. Last, trainers are slow in turns, each for half of the time in which it would use up the bound: at any time one
of n is slow, and all make 2 - 1 / n times the steps of sync mode, for as long as they train.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import ParameterServerStrategy, Trainer, TrainModule

Waiting = Callable[[int, int, torch.Generator], float]
"""Returns the seconds of a step, given a rank, the world size and the rank's own random numbers."""


def at_random(delay: float, rank: int, world_size: int, generator: torch.Generator) -> float:
    """Wait a random time up to `delay`."""
    return delay * torch.rand((), generator=generator).item()


def as_the_last(delay: float, rank: int, world_size: int, generator: torch.Generator) -> float:
    """Wait twice as long on the last trainer."""
    return delay * (1 + (rank == world_size - 1))


def in_turns(delay: float, turn: float, rank: int, world_size: int, generator: torch.Generator) -> float:
    """Wait twice as long on one trainer after another, each for `turn` seconds of the machine's clock."""
    return delay * (1 + (int(time.monotonic() / turn) % world_size == rank))


class Waits(TrainModule):
    """A small module whose steps take longer.

    Args:
        path: where the first trainer writes what it has measured.
        waiting: how long a step takes.
    """

    def __init__(self, path: Path, waiting: Waiting) -> None:
        super().__init__()
        self.path, self.waiting = path, waiting
        self.layer = nn.Linear(8, 1)
        self.times = list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        strategy = self.trainer.strategy
        self.times.append(time.perf_counter())
        time.sleep(self.waiting(strategy.rank, strategy.world_size, self.generator))
        return self.layer(batch[0]).square().mean()

    def on_train_start(self) -> None:
        self.generator = torch.Generator().manual_seed(self.trainer.strategy.rank)

    def on_train_end(self) -> None:
        strategy: Any = self.trainer.strategy
        times = strategy.all_gather_object(self.times)  # all have pushed
        if strategy.rank == 0:
            ledger = strategy.ledger().tolist() if strategy.choices.bound else []
            self.path.write_text(json.dumps({"times": times, "ledger": ledger}))
        del self.generator

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def fit(waiting: Waiting, max_staleness: int, trainers: int, steps: int) -> tuple[list[list[float]], list[list[int]]]:
    """Train; return when each step of each trainer began, and the ledger.

    Args:
        waiting: how long a step takes.
        max_staleness: 0 for sync mode.
        trainers: how many there are.
        steps: of each of them.
    """
    with TemporaryDirectory() as folder:
        module = Waits(Path(folder, "measured"), waiting)
        trainer = Trainer(
            strategy=ParameterServerStrategy(mode="async", max_staleness=max_staleness),
            accelerator="cpu",
            devices=trainers,
            max_epochs=1,
            logger=False,
            log_every_n_steps=0,  # reducing metrics would make all trainers wait for each other
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(TensorDataset(torch.randn(steps * trainers, 8)), 1))
        measured = json.loads(module.path.read_text())
    return measured["times"], measured["ledger"]


def largest_lead(ledger: list[list[int]], trainers: int) -> int:
    """Return the most steps that any trainer was ahead of the slowest, from the order of pushes."""
    clocks, largest = [0] * trainers, 0
    for trainer, step, *_ in ledger:
        assert clocks[trainer] == step
        clocks[trainer] += 1
        largest = max(largest, clocks[trainer] - min(clocks))
    return largest


def seconds(times: list[list[float]], steps: int) -> float:
    """Return the mean time of some trainers' first steps, after the one in which servers get the parameters."""
    last = min(steps, len(times[0]) - 2) + 1
    return fmean((own[last] - own[1]) / (last - 1) for own in times)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--max-staleness", type=int, default=4, help="with random delays")
    parser.add_argument("--steps", type=int, default=1000, help="of each trainer, with random delays")
    parser.add_argument("--slow-staleness", type=int, default=30, help="where one trainer is at half the speed")
    parser.add_argument("--slow-steps", type=int, default=200, help="of each trainer, one of them at half the speed")
    parser.add_argument("--turn-trainers", type=int, default=4, help="that are slow in turns")
    parser.add_argument("--delay", type=float, default=0.05, help="seconds of a step of the others")
    arguments = parser.parse_args()
    trainers, delay, bound, steps = arguments.trainers, arguments.delay, arguments.slow_staleness, arguments.slow_steps

    _, ledger = fit(partial(at_random, delay / 4), arguments.max_staleness, trainers, arguments.steps)
    leads = [row[2] for row in ledger]
    print(
        f"ledger: {len(ledger)} pushes, at most {largest_lead(ledger, trainers)} steps ahead of the slowest with "
        f"max_staleness={arguments.max_staleness}, {sum(leads) / len(leads):.2f} on the mean"
    )

    uneven = partial(as_the_last, delay)
    sync = seconds(fit(uneven, 0, trainers, steps)[0], steps)
    times, ledger = fit(uneven, bound, trainers, steps)
    found = [
        f"{sync / seconds(times[:-1], number):.2f} x the steps over the first {number}"
        for number in (2 * bound, round(bound * 8 / 3), steps)
    ]
    print(
        f"one trainer at half the speed, others at most {largest_lead(ledger, trainers)} steps ahead with "
        f"max_staleness={bound}: {', '.join(found)}; a step of sync mode takes {sync * 1e3:.1f} ms"
    )

    trainers = arguments.turn_trainers
    turns = partial(in_turns, delay, delay * bound)
    sync = seconds(fit(turns, 0, trainers, steps)[0], steps)
    times, ledger = fit(turns, bound, trainers, steps)
    print(
        f"{trainers} trainers at half the speed in turns, at most {largest_lead(ledger, trainers)} steps ahead with "
        f"max_staleness={bound}: {sync / seconds(times, steps):.2f} x the steps; a step of sync mode takes "
        f"{sync * 1e3:.1f} ms"
    )


if __name__ == "__main__":
    main()
