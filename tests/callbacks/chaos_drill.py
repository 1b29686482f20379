"""A program that trains 5 steps under injected faults and writes down each step as its forward begins.

Usage: chaos_drill.py FOLDER CHAOS DEVICES
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from echelon import Trainer, TrainModule
from echelon.callbacks.chaos_monkey import ChaosMonkey
from echelon.strategies.resilience.faults import Chaos


class Noting(TrainModule):
    """Adds the number of each step to a file of its rank."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.layer: Any = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with (self.folder / f"steps-{self.global_rank}").open("a") as file:
            file.write(f"{self.global_step + 1} ")
        loss: torch.Tensor = self.layer(batch).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def drill(folder: Path, text: str, devices: int) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="auto" if devices == 1 else "ddp",
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        callbacks=[ChaosMonkey(Chaos(text), folder / "marks")],
    )
    trainer.fit(Noting(folder), DataLoader(torch.ones(5 * devices, 2), batch_size=1))


if __name__ == "__main__":
    drill(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
