"""Helpers for most tests of the core: a small module, data that records which samples are read, a quiet trainer."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from echelon import EchelonError, Trainer, TrainModule


class Regression(TrainModule):
    """A linear regression that records the batches of each step."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.net: Any = nn.Linear(2, 1)
        self.lr = lr
        self.seen: list[Any] = []
        self.validated: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch)
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.validated.append(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Noted(Dataset[Any]):
    """The samples 0, 1, 2, ... as input and target; it records which were read."""

    def __init__(self, num_samples: int = 8) -> None:
        self.num_samples = num_samples
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads.append(index)
        return torch.full((2,), float(index)) / 10, torch.full((1,), float(index)) / 10


def samples(num_samples: int = 8) -> TensorDataset:
    """Return the samples of `Noted`, in memory."""
    x = torch.arange(float(num_samples))[:, None] / 10
    return TensorDataset(x.expand(-1, 2).contiguous(), x)


def loader(num_samples: int = 8, batch_size: int = 2, **options: Any) -> DataLoader[Any]:
    """Return a loader of these samples."""
    return DataLoader(samples(num_samples), batch_size, **options)


def indices(batches: Any) -> list[list[int]]:
    """Return the indices of the samples in each of these batches."""
    return [(batch[1].flatten() * 10).round().int().tolist() for batch in batches]


def flat(batches: Any) -> list[int]:
    """Return the indices of all samples in these batches, in order."""
    return list(chain.from_iterable(indices(batches)))


def quiet(folder: Path | None = None, **settings: Any) -> Trainer:
    """Return a trainer that writes and prints nothing, unless the settings say so."""
    silent: dict[str, Any] = {
        "default_root_dir": folder,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return Trainer(**{**silent, **settings})


def raises(error: type[EchelonError], *parts: str) -> Any:
    """Expect an error whose message contains these parts in this order."""
    return pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, parts)))
