"""The program that kill_strategies.py kills: it trains from the last checkpoint, and reports its processes.

Usage: kill_program.py FOLDER LAYOUT; leaves its weights in FOLDER/weights.pt.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import (
    Callback,
    CSVLogger,
    ElasticStrategy,
    FSDPStrategy,
    ModelCheckpoint,
    ParallelStrategy,
    SampleLedger,
    Trainer,
    TrainModule,
    seed_everything,
)

EPOCHS, STEPS_OF_EPOCH = 3, 8
PAUSE = 0.03  # seconds of a step, so that kills land between the first and the last
LAYOUTS: dict[str, tuple[int, Callable[[], Any]]] = {
    "single": (1, lambda: "single"),
    "ddp": (2, lambda: "ddp"),
    "zero": (2, lambda: "zero"),
    "local_sgd": (2, lambda: "local_sgd"),
    "fsdp": (2, lambda: "fsdp"),
    "hsdp": (4, partial(FSDPStrategy, replicate=2)),
    "tp": (2, partial(ParallelStrategy, tp=2)),
    "pp": (2, partial(ParallelStrategy, pp=2)),
    "ps": (2, lambda: "ps"),
    "elastic": (2, partial(ElasticStrategy, snapshot_every=2, max_restarts=1000)),
    "elastic fsdp": (2, partial(ElasticStrategy, "fsdp", snapshot_every=2, max_restarts=1000)),
}
"""The processes and the strategy of each."""


class Block(nn.Sequential):
    """Layers whose output is added to their input."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + super().forward(x)
        return added


class Tower(TrainModule):
    """A network whose result depends on weights, moments, random numbers and the order of the samples."""

    tp_plan: ClassVar = {"blocks.*.0": "colwise", "blocks.*.3": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(8, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        h = self.first(batch[0])
        for block in self.blocks:
            h = block(h)
        loss = nn.functional.mse_loss(self.last(h), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Tells(Callback):
    """Writes which processes train, once they begin to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Any, module: nn.Module) -> None:
        pids = trainer.strategy.all_gather_object(os.getpid())
        if trainer.is_global_zero:
            (part := self.folder / "ranks.part").write_text(json.dumps(pids))
            part.rename(self.folder / "ranks")

    def on_train_batch_start(self, trainer: Any, module: nn.Module, batch: Any, batch_idx: int) -> None:
        time.sleep(PAUSE / 2)


def train(folder: Path, layout: str) -> dict[str, Tensor]:
    """Train to the end, saving every third step in the background; return the weights."""
    seed_everything(0)
    devices, make = LAYOUTS[layout]
    saver = ModelCheckpoint(monitor="step", mode="max", every_n_train_steps=3, save_last=True, save_top_k=2)
    trainer = Trainer(
        strategy=make(),
        accelerator="cpu",
        devices=devices,
        max_epochs=EPOCHS,
        global_batch_size=8,
        callbacks=[saver, SampleLedger(), Tells(folder)],
        default_root_dir=folder,
        logger=CSVLogger(folder, "csv", version=0),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    inputs = torch.randn(8 * STEPS_OF_EPOCH - 3, 4, generator=torch.Generator().manual_seed(0))
    samples = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    module = Tower()
    trainer.fit(module, DataLoader(samples, 2, shuffle=True), ckpt_path="last")
    return module.state_dict()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.save(train(folder, sys.argv[2]), folder / "weights.pt")
