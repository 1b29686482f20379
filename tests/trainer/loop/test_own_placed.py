"""What strategies of others place: each method that they override is called, whatever the module is."""

from itertools import chain
from typing import ClassVar

import pytest
import torch
from as_rank import double_trainer, step_by_hand_on
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon.strategies import Placed, Strategy
from echelon.strategies.ddp import ReplicaStrategy
from echelon.strategies.placed.replica import PlacedReplica
from echelon.testing import run_ranks


class Line(echelon.TrainModule):
    """Learns one number, by an optimizer that the loop or the module itself steps."""

    def __init__(self, *, is_automatic=True):
        super().__init__()
        self.layer, self.automatic_optimization = nn.Linear(2, 1), is_automatic

    def training_step(self, batch, batch_idx):
        return step_by_hand_on(self, (self.layer(batch[0]) - batch[1]).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OwnBackward(Line):
    """The same, with a backward of its own."""

    def backward(self, loss, *args, **kwargs):
        loss.backward(*args, **kwargs)


def trained(module, strategy, **settings):
    """Return the weights of a module after two epochs of 13 samples."""
    torch.manual_seed(3)
    for parameter in module.parameters():
        nn.init.normal_(parameter.data)
    x = torch.randn(13, 2, dtype=torch.float64)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2)
    double_trainer(strategy=strategy, max_epochs=2, **settings).fit(module, data)
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


# --- an end of the backward, and no backward


class DoubledAtTheEnd(Placed):
    """A module on one device whose gradients are doubled after each backward, and had half their size before."""

    def end_backward(self):
        for parameter in self.module.parameters():
            parameter.grad.mul_(2)


class Doubling(Strategy):
    """Train on one device, with gradients of twice their size."""

    name: ClassVar[str] = "doubling"

    def make_placed(self, module, *, is_manual=False):
        self.precision.convert_module(module, self.device)
        return DoubledAtTheEnd(self.site, module)


class Halved(Line):
    """The same, with half of the loss."""

    def training_step(self, batch, batch_idx):
        return step_by_hand_on(self, (self.layer(batch[0]) - batch[1]).square().mean() / 2)


class HalvedInOwnBackward(Halved, OwnBackward):
    """Both."""


@pytest.mark.parametrize(
    ("plain", "halved", "settings"),
    [
        (Line, Halved, {}),
        (Line, HalvedInOwnBackward, {}),
        (lambda: Line(is_automatic=False), lambda: Halved(is_automatic=False), {}),
        (Line, Halved, {"gradient_clip_val": 0.5}),
    ],
    ids=["automatic", "own backward", "by hand", "clipped"],
)
def test_the_end_of_each_backward_is_called_though_the_backward_is_not_overridden(plain, halved, settings):
    torch.testing.assert_close(
        trained(halved(), Doubling(), **settings), trained(plain(), "single", **settings), rtol=0, atol=1e-14
    )


def test_an_engine_calls_it_too():
    engine = echelon.Engine(strategy=Doubling(), accelerator="cpu", devices=1)
    module = nn.Linear(2, 1)
    prepared, _ = engine.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    engine.backward(prepared(torch.ones(1, 2)).sum())
    assert module.bias.grad.item() == 2


# --- replicas whose gradients the placed module averages


class Averaging(Placed):
    """A module whose gradients meet after the last backward of a step, also on a rank that has no sample in it."""

    is_last = True

    def set_grad_sync(self, enabled):
        self.is_last = enabled

    def end_backward(self):
        super().end_backward()
        for parameter in self.module.parameters() if self.is_last else ():
            parameter.grad = self.ranks.all.all_reduce(parameter.grad, "mean")


class AveragedByHand(Averaging, PlacedReplica):
    """The same of a replica."""


class ByHand(ReplicaStrategy):
    """Train replicas without torch's DDP."""

    name: ClassVar[str] = "by_hand"

    def make_placed(self, module, *, is_manual=False):
        self._convert(module)
        return AveragedByHand(self.site, module, *self._replicate(module, is_manual=is_manual, averages=False))


class Behind(ByHand):
    """The same without a `PlacedReplica`."""

    name: ClassVar[str] = "behind"

    def make_placed(self, module, *, is_manual=False):
        self._convert(module)
        return Averaging(self.site, module)


def trained_by_hand(strategy):
    return [trained(make(), strategy(), global_batch_size=6) for make in (Line, OwnBackward)]


@pytest.mark.parametrize(("strategy", "processes"), [(ByHand, 2), (ByHand, 3), (Behind, 2)])
def test_replicas_without_ddp_train_as_one_process(strategy, processes):
    expected = trained(Line(), "single", global_batch_size=6)
    for weights in chain.from_iterable(run_ranks(trained_by_hand, processes, strategy)):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-14)
