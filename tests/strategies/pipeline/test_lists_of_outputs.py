"""Outputs that a step collects are on the last stage; a hook that expects them elsewhere is told so."""

import pytest
import torch
from as_rank import calm_down, double_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import ParallelStrategy, TrainModule
from echelon.testing import run_ranks


class Collects(TrainModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.outputs, self.mean = [], None

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def validation_step(self, batch, batch_idx):
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        self.outputs.append(x.mean(1))
        return x.mean(1)

    def on_validation_epoch_end(self):
        self.mean = torch.cat(self.outputs).mean()
        self.outputs.clear()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Asks(Collects):
    def on_validation_epoch_end(self):
        if self.trainer.strategy.has_loss:
            super().on_validation_epoch_end()


class CollectsWhatIsReturned(Collects):
    def validation_step(self, batch, batch_idx):
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        return x.mean(1)

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.outputs.append(outputs)


def validate(kind, **settings):
    torch.manual_seed(0)
    module = kind()
    data = TensorDataset(torch.randn(8, 3, generator=torch.Generator().manual_seed(1)))
    double_trainer(**settings).validate(module, DataLoader(data, 2), verbose=False)
    return module.mean


def validate_in_stages(*kinds):
    calm_down()
    return [validate(kind, strategy=ParallelStrategy(pp=2)) for kind in kinds]


def test_a_hook_that_finds_no_outputs_is_told_where_they_are():
    with pytest.raises((RuntimeError, ValueError), match="expected a non-empty list") as caught:
        run_ranks(validate_in_stages, 2, Collects)
    (note,) = [note for note in caught.value.__notes__ if "do not reach the loss" in note]
    assert note.startswith("on_validation_epoch_end ran on a rank") and "self.trainer.strategy.has_loss" in note


def test_outputs_are_where_the_loss_is_and_what_is_returned_is_everywhere():
    expected = pytest.approx(validate(Collects).item(), abs=1e-12)
    (nothing, mean), (asked, same_mean) = run_ranks(validate_in_stages, 2, Asks, CollectsWhatIsReturned)
    assert nothing is None
    assert (mean, asked, same_mean) == (expected, expected, expected)
