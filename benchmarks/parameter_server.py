"""Cost of a step with a parameter server: an MLP of a million parameters against DDP, and a table of a million rows.

Run ``python benchmarks/parameter_server.py``. Two trainers with one thread each. The first line has the time of a step
with ``strategy="ps"`` and one server and with ``"ddp"``, each the best of a few fits that take turns, and their ratio.
The table is a `RemoteEmbedding` whose rows are trained with SGD and sparse gradients: the second line has the bytes
sent in a step, and their ratio to those of the rows in the batch, which are pulled and whose gradients are pushed.
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

from echelon import DDPStrategy, ParameterServerStrategy, RemoteEmbedding, Strategy, Trainer, TrainModule


class Timed(TrainModule):
    """A module that records how long its steps take."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.times = path, list[float]()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.times.append(time.perf_counter())

    def on_train_end(self) -> None:
        if self.trainer.strategy.rank == 0:
            self.path.write_text(json.dumps(self.measured()))

    def measured(self) -> list[float]:
        """Return the median time of a step."""
        steps = torch.tensor(self.times).double().diff()
        return [steps[len(steps) // 4 :].median().item()]


class MLP(Timed):
    """An MLP of a million parameters."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.net = nn.Sequential(nn.Linear(784, 784), nn.ReLU(), nn.Linear(784, 480), nn.ReLU(), nn.Linear(480, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)


class Table(Timed):
    """A table of many rows."""

    def __init__(self, path: Path, num_rows: int) -> None:
        super().__init__(path)
        self.table, self.head = RemoteEmbedding(num_rows, 64, sparse=True), nn.Linear(64, 1)
        self.rows = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = (batch[0] * 1e9).long().abs() % self.table.num_embeddings
        self.rows += ids.unique().numel()
        return self.head(self.table(ids)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)

    def measured(self) -> list[float]:
        """Return the time of a step, its bytes, and their ratio to those of the rows."""
        strategy: Any = self.trainer.strategy
        return [*super().measured(), strategy.traffic / len(self.times), strategy.traffic / (2 * self.rows * 64 * 4)]


def fit(module: Timed, strategy: Strategy, steps: int) -> list[float]:
    """Train for some steps on two trainers; return what was measured."""
    data = TensorDataset(torch.randn(64 * steps, 784), torch.randint(10, (64 * steps,)))
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, 32))
    measured: list[float] = json.loads(module.path.read_text())
    return measured


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the table")
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {"ps": [], "ddp": []}
    with TemporaryDirectory() as folder:
        path = Path(folder, "measured")
        for _ in range(arguments.turns):
            times["ps"] += fit(MLP(path), ParameterServerStrategy(), arguments.steps)
            times["ddp"] += fit(MLP(path), DDPStrategy(), arguments.steps)
        remote = Table(path, arguments.rows)
        table = fit(remote, ParameterServerStrategy(dense="ddp"), min(arguments.steps, 50))
    served, reduced = min(times["ps"]), min(times["ddp"])
    print(f"MLP: ps {served * 1e3:.2f} ms, ddp {reduced * 1e3:.2f} ms, ratio {served / reduced:.2f}")
    print(f"table: {table[0] * 1e3:.2f} ms, {table[1] / 1e3:.0f} kB a step and trainer, {table[2]:.2f} x its rows")


if __name__ == "__main__":
    main()
