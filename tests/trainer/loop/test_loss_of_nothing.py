"""A Loss over no units weighs nothing, alone or among others."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from echelon import Loss, Trainer, TrainModule


class Masked(TrainModule):
    """The mean of all that is not masked."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Loss:
        x, mask = batch
        return Loss((self.weight * x * mask).sum(), mask.sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1.0)


@pytest.mark.parametrize(("accumulate", "expected"), [(1, 1.0 - 0.0 - 3.0), (2, 1.0 - 3.0)])
def test_micro_batches_without_units_change_nothing(accumulate: int, expected: float) -> None:
    x = torch.tensor([5.0, 6.0, 3.0, 3.0], dtype=torch.float64)
    mask = torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    module = Masked()
    trainer = Trainer(
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(x, mask), batch_size=2))
    assert module.weight.item() == expected
