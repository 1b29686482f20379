"""The program that a soak watches: it trains, and records when it completes each step.

Usage: soak_program.py FOLDER PLAN, where PLAN is JSON; leaves its weights in FOLDER/weights.pt.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import (
    Callback,
    CSVLogger,
    ElasticStrategy,
    ModelCheckpoint,
    SampleLedger,
    Trainer,
    TrainModule,
    seed_everything,
)


class Regression(TrainModule):
    """A small network in double precision, with a schedule by steps; only the data is random."""

    def __init__(self, pause: float) -> None:
        super().__init__()
        self.pause = pause
        layers = (nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        self.net = nn.Sequential(*layers).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(self.pause)
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.003)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9999)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Course(Callback):
    """Writes a line for each step, and ends the run at the step in the file `last`, once it is there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_start(self, trainer: Any, module: nn.Module) -> None:
        self.round = trainer.strategy.launcher.supervisor.round.number
        self.file = os.open(self.folder / "steps", os.O_APPEND | os.O_CREAT | os.O_WRONLY)

    def on_train_step_end(self, trainer: Any, module: nn.Module) -> None:
        if trainer.is_global_zero:
            os.write(self.file, f"{time.time()} {self.round} {trainer.global_step}\n".encode())
        last = self.folder / "last"
        trainer.should_stop = last.exists() and trainer.global_step >= int(last.read_text())


def train(folder: Path, plan: dict[str, Any]) -> None:
    """Train with the faults of a plan, until told to stop; or without faults, for this many steps."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    seed_everything(1)
    inputs = torch.randn(1000, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
    strategy: Any = plan["inner"]
    callbacks: list[Any] = [ModelCheckpoint(every_n_train_steps=200), SampleLedger()]
    if plan["chaos"]:
        strategy = ElasticStrategy(
            plan["inner"],
            chaos=plan["chaos"],
            max_restarts=1 << 20,
            snapshot_every=plan["snapshot_every"],
            hang_timeout=timedelta(seconds=plan["hang_timeout"]),
        )
        callbacks.append(Course(folder))
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        global_batch_size=8,
        max_epochs=1 << 20,
        max_steps=plan["steps"],
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        callbacks=callbacks,
        logger=CSVLogger(folder, "csv"),
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Regression(plan["pause"])
    trainer.fit(module, DataLoader(data, 4, shuffle=True), DataLoader(TensorDataset(*data[:32]), 8))
    torch.save(module.state_dict(), folder / "weights.pt")


if __name__ == "__main__":
    train(Path(sys.argv[1]), json.loads(sys.argv[2]))
