"""The collectives of a strategy whose ranks share replicas: those over data ranks, and those over all ranks."""

from __future__ import annotations

import functools

import pytest
import torch
from as_rank import calm_down, double_trainer, world_size
from shared_replicas import SharedReplicas
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import TrainModule, seed_everything
from echelon.common.errors import ConfigError
from echelon.strategies.elastic import ForwardingStrategy
from echelon.testing import run_ranks


class Talking(TrainModule):
    """Calls every public collective in its step; in each of two data ranks all parts of a replica have the same."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        strategy = self.trainer.strategy
        place = strategy.data_rank
        mine = torch.full((2,), 1.0 + place, dtype=torch.float64, requires_grad=True)
        assert strategy.all_reduce({"n": 1, "t": mine.detach()}) == {"n": 2, "t": pytest.approx([3.0, 3.0])}
        assert strategy.reduce(mine.detach(), "sum").tolist() == [3.0, 3.0]
        assert strategy.all_gather(mine)[:, 0].tolist() == self.all_gather(mine)[:, 0].tolist() == [1.0, 2.0]
        assert strategy.reduce_scatter(mine).tolist() == [3.0]
        assert strategy.all_gather_object(place) == [0, 1]
        assert strategy.gather(place) == ([0, 1] if place == 0 else None)
        assert strategy.scatter(["a", "b"] if place == 0 else None) == "ab"[place]
        if place:
            strategy.send(place, 0)
        else:
            assert strategy.recv(1) == 1
        self._broadcast(strategy)
        # what only one rank finds is known to all: this one is a decision of the run
        assert strategy.reduce_boolean_decision(strategy.rank == 3, all=False)
        assert not strategy.reduce_boolean_decision(strategy.rank != 3)
        strategy.barrier()
        return self.weight * batch[0].mean()

    def _broadcast(self, strategy):
        place = strategy.data_rank
        assert strategy.broadcast("run" if strategy.rank == 0 else None) == "run"  # as Lightning's users write it
        assert strategy.broadcast(strategy.rank, src=1) == 2  # the first of data rank 1
        sent = torch.full((2,), 1.0 + place, dtype=torch.float64, requires_grad=True)
        received = strategy.broadcast(sent, src=1)
        assert received.tolist() == [2.0, 2.0]
        (received * (3.0 + place)).sum().backward()
        if place == 1:
            assert sent.grad.tolist() == [7.0, 7.0]  # of two data ranks, on each rank that holds a part
        with pytest.raises(ConfigError, match=r"src=2 must be a rank from 0 to 1"):
            strategy.broadcast(1, src=2)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def talk(**settings):
    calm_down()
    trainer = double_trainer(strategy=SharedReplicas(2, **settings), max_steps=1)
    trainer.fit(Talking(), DataLoader(TensorDataset(torch.ones(4, 1, dtype=torch.float64)), batch_size=2))
    forwarding = ForwardingStrategy(trainer.strategy)
    assert forwarding.ranks is trainer.strategy.ranks
    return True


@pytest.mark.parametrize("settings", [{}, {"check_collectives": True}])
def test_the_collectives_of_the_user_are_those_of_the_data_ranks(settings):
    assert run_ranks(functools.partial(talk, **settings), 4) == [True] * 4


class Contrastive(TrainModule):
    """Tells each sample from all others of the step, on whichever rank they are."""

    def __init__(self):
        super().__init__()
        seed_everything(2, verbose=False)
        self.net = nn.Linear(3, 2, dtype=torch.float64)

    def training_step(self, batch, batch_idx):
        own = self.net(batch[0])
        others = self.all_gather(own, sync_grads=True).reshape(-1, 2)
        first = self.trainer.strategy.data_rank * len(own)
        return nn.functional.cross_entropy(own @ others.T, torch.arange(first, first + len(own)))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def contrast():
    calm_down()
    module = Contrastive()
    trainer = double_trainer(strategy=SharedReplicas(2) if world_size() > 1 else "single", max_epochs=1)
    samples = torch.arange(36.0, dtype=torch.float64).reshape(12, 3).cos()
    trainer.fit(module, DataLoader(TensorDataset(samples), batch_size=6 // max(world_size() // 2, 1)))
    return module.net.weight.flatten().tolist()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_contrastive_loss_sees_no_sample_twice(num_ranks):
    (alone,) = run_ranks(contrast, 1)
    for weights in run_ranks(contrast, num_ranks):
        assert weights == pytest.approx(alone, abs=1e-12)
