"""Spirals: a demo that needs only what is installed with Echelon; a small network tells points of two spirals apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from ....callbacks import ModelCheckpoint
from ....common.console import say
from ...data.seed import seed_everything
from ...module.train_module import TrainModule
from ...trainer import Trainer


class Spirals(TrainModule):
    """Two classes of points in the plane."""

    def __init__(self, width: int = 64, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss."""
        points, labels = batch
        loss = nn.functional.cross_entropy(self.net(points), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the accuracy."""
        points, labels = batch
        self.log("accuracy", (self.net(points).argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def train(num_epochs: int, *, strategy: str, devices: str) -> Trainer:
    """Train and validate on 1500 points, of which a fifth is held out, and say where the curves are."""
    seed_everything(1)
    labels, angles = torch.arange(1500) % 2, torch.rand(1500) * 9
    turned = angles + labels * torch.pi
    points = angles[:, None] / 9 * torch.stack([turned.cos(), turned.sin()], dim=1)
    fitted, held_out = random_split(TensorDataset(points, labels), [1200, 300])
    saves = ModelCheckpoint(monitor="accuracy", mode="max")
    trainer = Trainer(strategy=strategy, devices=devices, max_epochs=num_epochs, callbacks=saves, log_every_n_steps=10)
    trainer.fit(Spirals(), DataLoader(fitted, 32, shuffle=True), DataLoader(held_out, 300))
    if trainer.is_global_zero:
        say(f"Accuracy:     {float(trainer.callback_metrics['accuracy']):.1%} of 300 points that it has not seen")
    return trainer
