"""The program that test_kills.py kills: it trains from the last checkpoint in a folder, which may be a URL.

Usage: store_program.py CHECKPOINTS OUT [STEPS]; writes OUT/begun once it trains and OUT/trained when
that is over, and leaves its weights in OUT/weights.pt.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Callback, ModelCheckpoint, Trainer, TrainModule, seed_everything

STEPS = 30


class Net(TrainModule):
    """A network whose result depends on weights, moments, random numbers and the order of the samples."""

    def __init__(self, width=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Tells(Callback):
    """Says that the run has begun."""

    def __init__(self, out):
        self.out = out

    def on_train_start(self, trainer, module):
        (self.out / "begun").touch()

    def on_train_end(self, trainer, module):
        (self.out / "trained").touch()


def data():
    """Return a loader of samples."""
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 4, shuffle=True)


def saver(folder):
    """Return what saves every second step, and keeps the newest two."""
    return ModelCheckpoint(folder, monitor="step", mode="max", every_n_train_steps=2, save_last=True, save_top_k=2)


def main(folder, out, steps=STEPS):
    """Train to the end."""
    seed_everything(0)
    module = Net()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        callbacks=[saver(folder), Tells(out)],
        default_root_dir=out,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data(), ckpt_path="last")
    torch.save(module.state_dict(), out / "weights.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
