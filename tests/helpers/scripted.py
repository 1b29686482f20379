"""A tiny module with predefined metrics, and the trainer that most callback tests use."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import ModelCheckpoint, Trainer, TrainModule


class Scripted(TrainModule):
    """A linear regression that logs given values: one ``val_loss`` per validation, one ``train_end`` per epoch."""

    def __init__(self, val_losses: Iterable[float] = (), epoch_values: Iterable[float] = (), lr: float = 0.1) -> None:
        super().__init__()
        self.net: Any = nn.Linear(2, 1)
        self.lr = lr
        self.val_losses = list(val_losses)
        self.epoch_values = list(epoch_values)
        self.num_validations = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        if self.epoch_values:
            self.log("train_end", self.epoch_values[self.current_epoch])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        if self.val_losses and not self.trainer.sanity_checking:
            self.log("val_loss", self.val_losses[self.num_validations])
            self.num_validations += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def batches(num_samples: int = 8, batch_size: int = 2) -> DataLoader[Any]:
    """Return a loader of a few fixed samples, in order."""
    x = torch.linspace(-1, 1, 2 * num_samples).reshape(num_samples, 2)
    return DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=batch_size)


def trainer_in(folder: Path, *callbacks: Any, **settings: Any) -> Trainer:
    """Return a quiet trainer with these callbacks, and without loggers, progress bar and default checkpoints."""
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        "num_sanity_val_steps": 0,
        "accelerator": "cpu",
    }
    return Trainer(default_root_dir=folder, callbacks=list(callbacks), **{**quiet, **settings})
