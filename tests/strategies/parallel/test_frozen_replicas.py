"""Frozen parameters of replicas that steps write are equal on all ranks, as one process has them, or an error."""

import re

import pytest
import torch
from as_rank import calm_down, double_trainer, world_size
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import TrainModule, seed_everything
from echelon.strategies.errors import ModuleError
from echelon.testing import run_ranks


class Memory(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.memory = nn.Parameter(torch.zeros(3), requires_grad=False)

    def training_step(self, batch, batch_idx):
        self.write(batch[0])
        return self.layer(batch[0]).square().mean()

    def write(self, x):
        self.memory.data += self.trainer.strategy.all_reduce(x.sum(0))

    def configure_optimizers(self):
        return torch.optim.SGD(self.layer.parameters(), lr=0.1)


class Counts(Memory):
    """Writes once for each micro-batch."""

    def write(self, x):
        self.memory.data += 1


class OwnSamples(Memory):
    def write(self, x):
        self.memory.data += x.sum(0)


class InAHookLater(Memory):
    def write(self, x):
        pass

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.global_step == 3:
            self.memory[0] = batch[0].sum()


class Manual(OwnSamples):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()


def fit(kind, size=8, batch_size=2, **settings):
    seed_everything(3, verbose=False)
    module = kind()
    data = TensorDataset(torch.randn(size, 3, generator=torch.Generator().manual_seed(1)).double())
    trainer = double_trainer(**{"max_epochs": 1, **settings})
    trainer.fit(module, DataLoader(data, batch_size // world_size()))
    return {name: value.clone() for name, value in module.state_dict().items()}


STRATEGIES = ("ddp", "zero")
MISTAKES = (OwnSamples, InAHookLater, Manual)


def train_each():
    calm_down()
    found = {}
    for strategy in STRATEGIES:
        found[strategy] = fit(Memory, strategy=strategy)
        # three micro-batches of one sample in the last window, so one rank has two, and the other has one
        found[strategy, "fewer"] = fit(Counts, 7, strategy=strategy, accumulate_grad_batches=2)
        found[strategy, "none"] = fit(Counts, 5, strategy=strategy)
        for kind in MISTAKES:
            with pytest.raises(ModuleError) as caught:
                fit(kind, strategy=strategy)
            found[strategy, kind] = str(caught.value)
    fit(OwnSamples, strategy="local_sgd")
    return found


def test_ranks_agree_or_get_an_error_that_names_the_parameter():
    expected = fit(Memory), fit(Counts, 7, accumulate_grad_batches=2), fit(Counts, 5)
    for found in run_ranks(train_each, 2):
        for strategy in STRATEGIES:
            torch.testing.assert_close(
                (found[strategy], found[strategy, "fewer"], found[strategy, "none"]), expected, rtol=0, atol=1e-12
            )
            for kind in MISTAKES:
                assert re.match("The frozen parameter memory has other values on rank 0 than", found[strategy, kind])
                assert "all_reduce" in found[strategy, kind] and "register_buffer" in found[strategy, kind]
