"""Boring classes: the small modules and data sets of Lightning's demos, with which reports and tests are written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from ..module import LightningDataModule, LightningModule


class RandomDataset(Dataset[Tensor]):
    """So many random vectors of a size."""

    def __init__(self, size: int, length: int) -> None:
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]

    def __len__(self) -> int:
        return self.len


class RandomDictDataset(Dataset[dict[str, Tensor]]):
    """Random vectors under ``a``, and under ``b`` the same plus 2."""

    def __init__(self, size: int, length: int) -> None:
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"a": self.data[index], "b": self.data[index] + 2}

    def __len__(self) -> int:
        return self.len


class RandomIterableDataset(IterableDataset[Tensor]):
    """A stream of so many random vectors."""

    def __init__(self, size: int, count: int) -> None:
        self.count, self.size = count, size

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.count):
            yield torch.randn(self.size)


class RandomIterableDatasetWithLen(RandomIterableDataset):
    """Such a stream that knows its length."""

    def __len__(self) -> int:
        return self.count


class BoringModel(LightningModule):
    """A linear layer that learns to give ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: nn.Module = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layer gives."""
        output: Tensor = self.layer(x)  # TorchScript knows no cast
        return output

    def loss(self, preds: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the loss of what the layer gave; labels are ones by default."""
        labels = torch.ones_like(preds) if labels is None else labels
        return nn.functional.mse_loss(preds, labels)

    def step(self, batch: Any) -> Tensor:
        """Return the loss of a batch."""
        return self.loss(self(batch))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.step(batch)}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"x": self.step(batch)}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return {"y": self.step(batch)}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [StepLR(optimizer, step_size=1)]

    def train_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 64))

    def val_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 64))

    def test_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 64))

    def predict_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 64))


class ManualOptimBoringModel(BoringModel):
    """The same with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.step(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class BoringDataModule(LightningDataModule):
    """The data of a `BoringModel`, made in ``setup``."""

    random_train: Dataset[Tensor]
    random_val: Dataset[Tensor]
    random_test: Dataset[Tensor]
    random_predict: Dataset[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.random_full: Dataset[Tensor] = RandomDataset(32, 64 * 4)

    def setup(self, stage: str) -> None:
        places = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}
        for place in places[stage]:
            first = 64 * ("train", "val", "test", "predict").index(place)
            setattr(self, f"random_{place}", Subset(self.random_full, range(first, first + 64)))

    def train_dataloader(self) -> Any:
        return DataLoader(self.random_train)

    def val_dataloader(self) -> Any:
        return DataLoader(self.random_val)

    def test_dataloader(self) -> Any:
        return DataLoader(self.random_test)

    def predict_dataloader(self) -> Any:
        return DataLoader(self.random_predict)


class DemoModel(LightningModule):
    """A linear layer whose sizes are arguments."""

    def __init__(self, out_dim: int = 10, learning_rate: float = 0.02) -> None:
        super().__init__()
        self.l1 = nn.Linear(32, out_dim)
        self.learning_rate = learning_rate

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layer gives, where it is positive."""
        return torch.relu(self.l1(x.view(x.size(0), -1)))

    def training_step(self, batch: Any, batch_nb: int) -> Any:
        return self(batch).sum()

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)
