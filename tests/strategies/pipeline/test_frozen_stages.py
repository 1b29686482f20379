"""A stage of a pipeline whose parameters are all frozen takes part in what the ranks agree on before an update."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from echelon import ParallelStrategy, Trainer, TrainModule, seed_everything


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.layer(x)
        return out


class HalfFrozen(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.blocks[:2].requires_grad_(False)

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.blocks(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("precision", ["64-true", "16-mixed"])
def test_a_frozen_stage_takes_part_in_clipping_and_in_looking_for_overflows(precision):
    trained = []
    for strategy, devices in (("single", 1), (ParallelStrategy(pp=2), 2)):
        seed_everything(1)
        module = HalfFrozen()
        trainer = Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=devices,
            precision=precision,
            gradient_clip_val=0.1,
            accumulate_grad_batches=2,
            max_steps=3,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(torch.randn(32, 8, generator=torch.Generator().manual_seed(1)), 4))
        trained.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    torch.testing.assert_close(*trained, atol=1e-12 if precision == "64-true" else 1e-3, rtol=0)
