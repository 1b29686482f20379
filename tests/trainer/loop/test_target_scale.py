"""Gradients of a mean over targets have the right size to a power of two, so that nothing is rounded by it."""

import pytest
import torch
from as_rank import attempt, calm_down, double_trainer, world_size
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from echelon import ModelCheckpoint, TrainModule, seed_everything
from echelon.strategies.state.dtensor import is_dtensor
from echelon.testing import run_ranks

CLASSES = 5


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


def fit_texts(folder, strategy, length, kind=Texts, **settings):
    """Return the parameters at the end, and by what gradients were multiplied."""
    seed_everything(3, verbose=False)
    module = kind()
    tokens = torch.randint(CLASSES, (22, length + 1), generator=torch.Generator().manual_seed(1))
    trainer = double_trainer(
        strategy=strategy, max_epochs=2, accumulate_grad_batches=2, enable_checkpointing=True, default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")],
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(tokens), 4 // world_size()), **settings)
    weights = {
        name: value.full_tensor() if is_dtensor(value) else value.detach().clone()
        for name, value in module.named_parameters()
    }
    return weights, module.factors


def fit_and_resume(folder, strategy):
    """Return how runs end with 8 and 7 targets a sample, resumed ones, and with other losses."""
    saved, again = folder / strategy, folder / f"{strategy} again"
    runs = {"eight": fit_texts(saved / "8", strategy, 8), "seven": fit_texts(saved / "7", strategy, 7)}
    for name, length in (("eight", 8), ("seven", 7)):
        path = saved / f"{length}" / "step=2.ckpt"
        runs[f"{name} resumed"] = fit_texts(again / name, strategy, length, ckpt_path=path)
    runs["ignored"] = fit_texts(again / "ignored", strategy, 8, OneIgnored)
    return runs | {"samples": fit_texts(again / "samples", strategy, 8, Samples)}


def fit_each(folder, strategies):
    calm_down()
    return {strategy: attempt(fit_and_resume, folder, strategy) for strategy in strategies}


FACTORS = {
    "eight": [1 / 8],  # of the first step alone
    "seven": [1 / 7, *[8 / 7] * 5],
    "eight resumed": [1 / 8],
    "seven resumed": [1 / 7, *[8 / 7] * 3],
    "samples": [],
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_targets_as_often_as_before_multiply_no_gradient_and_change_no_bit(tmp_path, ranks):
    alone = fit_and_resume(tmp_path / "alone", "single")
    strategies = ["ddp", "zero", "fsdp"]
    for found in [{"single": alone}] if ranks == 1 else run_ranks(fit_each, ranks, tmp_path, strategies):
        for strategy, runs in found.items():
            assert isinstance(runs, dict), f"{strategy}: {runs}"
            for name, factors in FACTORS.items():
                assert runs[name][1] == pytest.approx(factors, rel=1e-12), (strategy, name)
                torch.testing.assert_close(
                    runs[name][0], alone[name][0], rtol=0, atol=1e-12, msg=f"{strategy}, {name}: {{}}".format
                )
            left = 6 * 8 - 2 * ranks  # one target less in each micro-batch
            assert runs["ignored"][1] == pytest.approx([1 / 8, 48 / left], rel=1e-12), strategy
            for name in ("eight", "seven"):
                for parameter, value in runs[name][0].items():
                    assert torch.equal(value, runs[f"{name} resumed"][0][parameter]), (strategy, name, parameter)
