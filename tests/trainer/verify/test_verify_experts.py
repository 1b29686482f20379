"""`verify` compares layouts with experts, and tells strategies with different degrees apart by name."""

import pytest
import torch
from sweep import IS_SWEEP
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import DataModule, Experts, FSDPStrategy, ParallelStrategy, TrainModule
from echelon.testing import Layout, verify
from echelon.trainer.verify.layout import layouts_of


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(6), Experts(6, 4, 4)

    def forward(self, x):
        return x + self.experts(self.norm(x))


class Mixture(TrainModule):
    def __init__(self):
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(5, 6), nn.Sequential(Block(), Block()), nn.Linear(6, 1)

    def training_step(self, batch):
        return nn.functional.mse_loss(self.last(self.blocks(self.first(batch[0]))), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.03)


class Numbers(DataModule):
    def train_dataloader(self):
        x = torch.linspace(-1, 1, 480).view(96, 5)
        return DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), 16)


@pytest.mark.sweep
def test_layouts_with_experts_are_compared_under_the_names_of_their_degrees():
    layouts = [
        Layout(ParallelStrategy(ep=2), 2),
        Layout(ParallelStrategy(pp=2, ep=2), 4),
    ]
    assert [layout.name for layout in layouts] == ["ep=2, 2 ranks", "pp=2, ep=2, 1f1b, 4 ranks"]
    taken = layouts if IS_SWEEP else layouts[:1]
    report = verify(Mixture(), Numbers(), taken, steps=2)
    report.check()
    assert all(layout.name in str(report) for layout in taken)


def test_strategies_of_one_kind_have_names_of_their_own():
    given = ["fsdp:4", ParallelStrategy(tp=2), ParallelStrategy(cp=2, dp_shard=1), ParallelStrategy(), FSDPStrategy()]
    assert [layout.name for layout in layouts_of(given, 2)] == [
        "fsdp x 4", "tp=2, 2 ranks", "cp=2, 2 ranks", "tp, 2 ranks", "fsdp x 2",
    ]  # fmt: skip
