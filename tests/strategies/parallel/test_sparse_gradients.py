"""Sparse gradients of replicas equal one process's, and so do those of the layers beside them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from echelon import Trainer, TrainModule, seed_everything


class Positions(TrainModule):
    """Adds a sparse table to a dense one, so that both get the same tensor as the gradient of their output."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Embedding(6, 3)
        self.sparse = nn.Embedding(6, 3, sparse=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.dense(batch) + self.sparse(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def trained(strategy: str, devices: int) -> Positions:
    seed_everything(0, verbose=False)
    module = Positions()
    samples: Any = torch.randint(6, (32,))
    Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        max_epochs=1,
        global_batch_size=8,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, DataLoader(samples, 4))
    return module


def test_a_dense_table_beside_a_sparse_one_gets_its_whole_gradient() -> None:
    many, one = trained("ddp", 2), trained("single", 1)
    torch.testing.assert_close(many.state_dict(), one.state_dict())
