"""A program that trains on two stages with random shapes, evaluations and checkpoints, and counts what is left.

Usage: python tests/strategies/pipeline/pipeline_leaks.py [--steps 200]. It prints, for every fourth of the steps, the
open files (except those of a checkpoint that is being written), the threads and the tensors of the rank with the most,
its memory, and the shapes that its stages know.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from echelon import Callback, ModelCheckpoint, ParallelStrategy, Trainer, TrainModule, seed_everything
from echelon.testing import run_ranks

MOST = 6
"""The largest number of samples of a micro-batch; a sequence is at most twice as long."""
PIECES = 4


class RandomShapes(IterableDataset[Tensor]):
    """Micro-batches of tokens, of any number of samples and length."""

    def __init__(self, number: int, seed: int) -> None:
        self._number, self._seed = number, seed

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self._seed)
        for _ in range(self._number):
            samples, length = torch.randint(1, MOST, (2,), generator=generator).tolist()
            yield torch.randint(16, (samples, 2 * length), generator=generator)


class Model(TrainModule):
    """A table, four blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(4)))
        self.head = nn.Linear(8, 16)

    def loss(self, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.blocks(self.table(tokens))).flatten(0, 1), tokens.flatten())

    def training_step(self, tokens: Tensor) -> Tensor:
        loss = self.loss(tokens)
        self.log("loss/train", loss)
        return loss

    def validation_step(self, tokens: Tensor) -> None:
        self.log("loss/val", self.loss(tokens))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Count(Callback):
    """Count what there is, every few steps."""

    def __init__(self, every: int) -> None:
        self._every = every
        self.counts: list[dict[str, float]] = []

    def on_train_step_end(self, trainer: Any, module: nn.Module) -> None:
        if trainer.global_step % self._every == 0:
            self.counts.append(self._now(trainer))

    def _now(self, trainer: Any) -> dict[str, float]:
        gc.collect()
        # an empty one is of the checkpoint that is being written
        tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor) and thing.numel()]
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        own = {
            "files": sum(not is_inside(fd, trainer.checkpoint_callback.dirpath) for fd in os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "tensors": len(tensors),
            "megabytes": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
            "shapes": len(trainer.strategy.placed.pipeline.runner.known),
        }
        most: dict[str, float] = trainer.strategy.ranks.all.all_reduce(own, "max")
        return most


def is_inside(fd: str, folder: str | Path) -> bool:
    """Return whether an open file is in a folder, such as that of a checkpoint that is being written."""
    with contextlib.suppress(OSError):  # closed meanwhile
        return os.readlink(f"/proc/self/fd/{fd}").startswith(str(folder))
    return False


def train(folder: Path, num_steps: int) -> list[dict[str, float]]:
    """Train in this process; return the counts of each fourth of the steps, of the rank with the most."""
    seed_everything(1, verbose=False)
    count = Count(num_steps // 4)
    trainer = Trainer(
        strategy=ParallelStrategy(pp=2, schedule="interleaved_1f1b"),
        accelerator="cpu",
        accumulate_grad_batches=PIECES,
        max_steps=num_steps,
        max_epochs=-1,
        val_check_interval=5 * PIECES,
        callbacks=[count, ModelCheckpoint(folder, every_n_train_steps=5, save_top_k=1, monitor=None)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data, other = RandomShapes(num_steps * PIECES, 1), RandomShapes(3, 2)
    trainer.fit(Model(), DataLoader(data, batch_size=None), DataLoader(other, batch_size=None))
    return count.counts


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counts = run_ranks(train, 2, Path(folder), options.steps, timeout=900)[0]
    for at, found in enumerate(counts, 1):
        shown = ", ".join(f"{number:.1f} {name}" if name == "megabytes" else f"{number:.0f} {name}"
                          for name, number in found.items())  # fmt: skip
        print(f"after {at * options.steps // 4} steps: {shown}")


if __name__ == "__main__":
    main()
