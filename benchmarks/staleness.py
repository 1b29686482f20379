"""How stale async mode of a parameter server gets, and what it saves where trainers have different speeds.

Run ``python benchmarks/staleness.py``. First trainers wait a random time at each step; the ledger of all pushes is read
again, from the order of its rows alone, for the most that any trainer was ahead of the slowest. Then one trainer takes
twice as long for a step as the others, which is measured in sync mode, and in async mode with a bound that they do not
reach; a smaller one holds them once they have used it up, after about twice as many steps as it allows.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import ParameterServerStrategy, Trainer, TrainModule


class Waits(TrainModule):
    """A small module whose steps take longer: a random time, or twice as long on the last trainer.

    Args:
        path: where the first trainer writes what it has measured.
        delay: the seconds that a step of the others takes.
        is_random: whether it is a random time from 0 to `delay`, on each trainer.
    """

    def __init__(self, path: Path, delay: float, *, is_random: bool) -> None:
        super().__init__()
        self.path, self.delay, self.is_random = path, delay, is_random
        self.layer = nn.Linear(8, 1)
        self.times = list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        strategy = self.trainer.strategy
        is_last = strategy.rank == strategy.world_size - 1
        self.times.append(time.perf_counter())
        time.sleep(self.delay * (self.waits() if self.is_random else 1 + is_last))
        return self.layer(batch[0]).square().mean()

    def waits(self) -> float:
        """Return a random number from 0 to 1 that each trainer draws for itself."""
        return torch.rand((), generator=self.generator).item()

    def on_train_start(self) -> None:
        self.generator = torch.Generator().manual_seed(self.trainer.strategy.rank)

    def on_train_end(self) -> None:
        strategy: Any = self.trainer.strategy
        strategy.barrier()  # all have pushed
        if strategy.rank == 0:
            ledger = strategy.ledger().tolist() if strategy.choices.bound else []
            seconds = (self.times[-1] - self.times[0]) / (len(self.times) - 1)
            self.path.write_text(json.dumps({"seconds": seconds, "ledger": ledger}))
        del self.generator

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def fit(module: Waits, strategy: ParameterServerStrategy, trainers: int, steps: int) -> dict[str, Any]:
    """Train for some steps on each trainer; return what the first one has measured."""
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=trainers,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(steps * trainers, 8)), 1))
    measured: dict[str, Any] = json.loads(module.path.read_text())
    return measured


def largest_lead(ledger: list[list[int]], trainers: int) -> int:
    """Return by how many steps any trainer was ahead of the slowest, from who pushed after whom."""
    clocks, largest = [0] * trainers, 0
    for trainer, step, *_ in ledger:
        assert clocks[trainer] == step
        clocks[trainer] += 1
        largest = max(largest, clocks[trainer] - min(clocks))
    return largest


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--max-staleness", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1000, help="of each trainer, with random delays")
    parser.add_argument("--slow-steps", type=int, default=200, help="of each trainer, one of them at half the speed")
    parser.add_argument("--delay", type=float, default=0.02, help="seconds of a step of the others")
    arguments = parser.parse_args()
    trainers, bound = arguments.trainers, arguments.max_staleness
    with TemporaryDirectory() as folder:
        path = Path(folder, "measured")
        random = Waits(path, arguments.delay / 4, is_random=True)
        strategy = ParameterServerStrategy(mode="async", max_staleness=bound)
        ledger = fit(random, strategy, trainers, arguments.steps)["ledger"]
        uneven, steps = Waits(path, arguments.delay, is_random=False), arguments.slow_steps
        sync = fit(uneven, ParameterServerStrategy(), trainers, steps)["seconds"]
        free = ParameterServerStrategy(mode="async", max_staleness=steps)
        own_pace = fit(uneven, free, trainers, steps)["seconds"]
    leads = [row[2] for row in ledger]
    print(
        f"ledger: {len(ledger)} pushes, at most {largest_lead(ledger, trainers)} steps ahead of the slowest with "
        f"max_staleness={bound}, {sum(leads) / len(leads):.2f} on the mean"
    )
    print(
        f"one trainer at half the speed: a step of the others takes {sync * 1e3:.1f} ms in sync mode and "
        f"{own_pace * 1e3:.1f} ms in async mode, {sync / own_pace:.2f} x the steps"
    )


if __name__ == "__main__":
    main()
