"""A step with as many targets a sample as the one before multiplies no gradient, also in a run that is resumed."""

import math

import pytest
import torch
from as_rank import attempt, calm_down, double_trainer, world_size
from small import raises
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from echelon import CheckpointError, ModelCheckpoint, TrainModule, seed_everything
from echelon.strategies.state.dtensor import is_dtensor
from echelon.testing import run_ranks
from echelon.trainer.session.train_state import TrainState

CLASSES, LENGTH = 5, 7


class Texts(TrainModule):
    """A model of tokens whose sequences all have as many targets; it notes by what its gradients were multiplied."""

    ignored = 0

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(CLASSES, 3), nn.Linear(3, CLASSES)
        self.factors = []

    def on_train_start(self):
        placed = self.trainer.strategy.placed
        scale = placed.scale_gradients

        def noted(factor):
            self.factors.append(factor)
            scale(factor)

        placed.scale_gradients = noted

    def training_step(self, batch, batch_idx):
        (tokens,) = batch
        targets = tokens[:, 1:].clone()
        if self.ignored and self.trainer.global_step == self.ignored:
            targets[0, 0] = -100
        return F.cross_entropy(self.head(self.embed(tokens[:, :-1])).flatten(0, 1), targets.flatten())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class OneIgnored(Texts):
    """One target of the third step does not count."""

    ignored = 2


class Samples(Texts):
    """Its loss is weighted by samples."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * 1.0


def fit_texts(folder, strategy, kind=Texts, **settings):
    """Return the parameters at the end, by what gradients were multiplied, and what the last step counted."""
    seed_everything(3, verbose=False)
    module = kind()
    tokens = torch.randint(CLASSES, (22, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    trainer = double_trainer(
        strategy=strategy, max_epochs=2, accumulate_grad_batches=2, enable_checkpointing=True, default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")],
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(tokens), 4 // world_size()), **settings)
    weights = {
        name: value.full_tensor() if is_dtensor(value) else value.detach().clone()
        for name, value in module.named_parameters()
    }
    return weights, module.factors, trainer.counters.target_ratio


def fit_and_resume(folder, strategy):
    whole = fit_texts(folder / strategy, strategy)
    resumed = fit_texts(folder / f"{strategy} resumed", strategy, ckpt_path=folder / strategy / "step=2.ckpt")
    ignored = fit_texts(folder / f"{strategy} ignored", strategy, OneIgnored)
    other = fit_texts(folder / f"{strategy} other", strategy, Samples, ckpt_path=folder / strategy / "step=2.ckpt")
    return whole, resumed, ignored, other


def fit_each(folder, strategies):
    calm_down()
    return {strategy: attempt(fit_and_resume, folder, strategy) for strategy in strategies}


@pytest.mark.parametrize("ranks", [1, 2])
def test_as_many_targets_as_before_multiply_no_gradient(tmp_path, ranks):
    alone = fit_and_resume(tmp_path / "alone", "single")
    strategies = ["ddp", "zero", "fsdp"]
    left = 6 * LENGTH - 2 * ranks
    each = [{"single": alone}] if ranks == 1 else run_ranks(fit_each, ranks, tmp_path, strategies)
    for found in each:
        for name, runs in found.items():
            assert isinstance(runs, tuple), f"{name}: {runs}"
            (weights, factors, ratio), (resumed, resumed_factors, _), (_, ignored_factors, _), (other, _, none) = runs
            assert factors == [1 / LENGTH]  # of the first step
            assert ratio == [6 * LENGTH, 6]
            assert resumed_factors == []
            assert ignored_factors == pytest.approx([1 / LENGTH, 42 / left, left / 42], rel=1e-6)
            assert none is None
            for parameter in weights:
                assert torch.equal(weights[parameter], resumed[parameter]), (name, parameter)
            for index, got in ((0, weights), (3, other)):
                torch.testing.assert_close(got, alone[index][0], rtol=0, atol=1e-12)


NO_RATIOS = [[0.0, 4], [7, 0], [7, -4], [7], [7, 4, 1], ["7", "4"], [True, True], [math.nan, 4], [math.inf, 4], 7, "7"]


@pytest.mark.parametrize("value", NO_RATIOS, ids=repr)
def test_a_saved_ratio_that_is_none_is_refused(value):
    with raises(CheckpointError, "target_ratio", "two numbers above 0"):
        TrainState().load_state_dict({**TrainState().state_dict(), "target_ratio": value})


def test_a_state_without_ratio_is_loaded():
    saved = TrainState(target_ratio=[42.0, 6]).state_dict()
    state = TrainState()
    state.load_state_dict(saved)
    assert state.targets_of(4) == 28
    del saved["target_ratio"]
    state.load_state_dict(saved)
    assert state.targets_of(4) is None
