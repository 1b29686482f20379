"""The run whose checkpoints are kept for each released version, and the program that keeps them.

``python tests/trainer/checkpoint/released_run.py`` writes those of this version into released/<version>: what
``make release`` asks for once, and what is never written again.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import echelon

RELEASED = Path(__file__).with_name("released")
STEPS_SAVED, STEPS_WHOLE = 6, 11
"""Saved inside the second epoch of four steps, and in the midst of the third."""


class Kept(echelon.TrainModule):
    """A network in float64 with what checkpoints hold: hyper-parameters, a buffer, dropout, a schedule."""

    def __init__(self, width: int = 3, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, 1)).double()
        self.register_buffer("counted", torch.zeros((), dtype=torch.int64))
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Regress, count the samples, and log the loss."""
        x, y = batch
        self.counted = self.counted + len(x)
        self.seen.append(float(y.sum()))
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW whose rate decays by step."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add state of the user's own, of kinds that JSON lacks."""
        checkpoint["own"] = {"pair": (1, 2.5), "infinite": float("inf"), "tensor": torch.arange(3)}


def loader() -> DataLoader[Any]:
    """Return eight samples in a shuffled order."""
    x = torch.arange(16, dtype=torch.float64).reshape(8, 2) / 16
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=2, shuffle=True)


class SaveOnce(echelon.Callback):
    """Save at one step, as a folder and as one file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        """Save, in the midst of an epoch."""
        if trainer.global_step == STEPS_SAVED:
            trainer.save_checkpoint(self.folder / "folder.ckpt")
            trainer.save_checkpoint(self.folder / "file.ckpt", single_file=True)


def trained(folder: Path, ckpt_path: Path | None = None, *others: echelon.Callback) -> tuple[echelon.Trainer, Kept]:
    """Train to the last step, from the start or from a checkpoint."""
    echelon.seed_everything(7)
    module = Kept()
    stopping = echelon.EarlyStopping("loss", patience=9, check_on_train_epoch_end=True)
    trainer = echelon.Trainer(
        max_steps=STEPS_WHOLE,
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=[echelon.EMAWeightAveraging(decay=0.5), stopping, *others],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return trainer, module


def keep(released: Path) -> Path:
    """Write the checkpoints of this version, and beside them the weights with which the run ended."""
    place = released / echelon.__version__
    if place.exists():
        raise SystemExit(f"{place} exists already: what a released version wrote is kept as it is.")
    with tempfile.TemporaryDirectory() as scratch:
        built = Path(scratch) / "built"
        trainer, _ = trained(Path(scratch), None, SaveOnce(built))
        trainer.save_checkpoint(Path(scratch) / "whole.ckpt", weights_only=True)
        echelon.export(Path(scratch) / "whole.ckpt", built / "whole")
        shutil.copytree(built, place)
    return place


if __name__ == "__main__":
    os.umask(0o022)
    print(keep(RELEASED))
    sys.exit(0)
