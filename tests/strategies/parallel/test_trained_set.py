"""Parameters that are frozen or unfrozen while replicas train get the updates of one process, or an error by name."""

import re
from datetime import timedelta
from functools import partial

import pytest
import torch
from as_rank import calm_down, double_trainer, world_size
from sweep import IS_SWEEP, dealt
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import DDPStrategy, Engine, TrainModule, ZeroStrategy, seed_everything
from echelon.common.errors import ModuleError
from echelon.strategies.ddp import DDPOptions
from echelon.testing import run_ranks


class Model(TrainModule):
    """A backbone that begins frozen, and a head; subclasses change that."""

    begins_frozen = True

    def __init__(self):
        super().__init__()
        self.backbone, self.head = nn.Linear(3, 4), nn.Linear(4, 1)
        self.backbone.requires_grad_(not self.begins_frozen)

    def training_step(self, batch, batch_idx):
        return self.head(self.backbone(batch[0]).tanh()).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class UnfrozenAtAnEpoch(Model):
    def on_train_epoch_start(self):
        self.backbone.requires_grad_(self.trainer.current_epoch > 0)


class UnfrozenBeforeABatch(Model):
    def on_train_batch_start(self, batch, batch_idx):
        self.backbone.requires_grad_(batch_idx > 0)


class UnfrozenAfterABackward(Model):
    def on_after_backward(self):
        self.backbone.bias.requires_grad_(True)


class UnfrozenInAStep(Model):
    def training_step(self, batch, batch_idx):
        if batch_idx > 1:
            self.backbone.weight.requires_grad_(True)
        return super().training_step(batch, batch_idx)


class FrozenAtAnEpoch(Model):
    begins_frozen = False

    def on_train_epoch_start(self):
        self.backbone.requires_grad_(self.trainer.current_epoch == 0)


class FrozenBeforeABatch(Model):
    """Also between the micro-batches of a step."""

    begins_frozen = False

    def on_train_batch_start(self, batch, batch_idx):
        self.backbone.weight.requires_grad_(batch_idx % 2 == 0)


class AllFrozenAtFirst(Model):
    """Begins with nothing to train."""

    def __init__(self):
        super().__init__()
        self.head.requires_grad_(False)

    def on_fit_start(self):
        self.head.weight.requires_grad_(True)


class FrozenInAStep(Model):
    begins_frozen = False

    def training_step(self, batch, batch_idx):
        self.backbone.requires_grad_(batch_idx < 1)
        return super().training_step(batch, batch_idx)


class OnOneRank(Model):
    def on_train_epoch_start(self):
        if self.trainer.current_epoch == 1:
            self.backbone.requires_grad_(self.trainer.strategy.rank == 0)


class OtherOnEachRank(Model):
    def on_train_epoch_start(self):
        if self.trainer.current_epoch == 1:
            (self.backbone.weight if self.trainer.strategy.rank else self.backbone.bias).requires_grad_(True)


class InAGroupOfItsOwn(Model):
    """Gives the optimizer what it unfreezes."""

    def on_train_epoch_start(self):
        if self.trainer.current_epoch == 1:
            self.backbone.requires_grad_(True)
            self.trainer.optimizers[0].add_param_group({"params": list(self.backbone.parameters()), "lr": 0.01})

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def fit(kind, size=6, **settings):
    seed_everything(3, verbose=False)
    module = kind()
    rows = torch.randn(size, 3, generator=torch.Generator().manual_seed(1)).double()
    if "accumulate_grad_batches" in settings:  # which samples of a step are in its first micro-batch must not matter
        rows = rows[:3].repeat_interleave(4, 0)
    data = TensorDataset(rows)
    trainer = double_trainer(max_epochs=3, **settings)
    trainer.fit(module, DataLoader(data, 2 // world_size()))
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def loop():
    """Unfreeze in a user's own loop."""
    engine = Engine(strategy="ddp" if world_size() > 1 else "single", accelerator="cpu", precision="64-true")
    seed_everything(3, verbose=False)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    model, optimizer = engine.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rows = torch.randn(6, 2, 3, generator=torch.Generator().manual_seed(1)).double()
    for step, row in enumerate(rows):
        model[0].requires_grad_(step in (2, 3))
        engine.backward(model(row if world_size() == 1 else row[engine.global_rank][None]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.named_parameters()}


KINDS = {
    "epoch": UnfrozenAtAnEpoch,
    "batch": UnfrozenBeforeABatch,
    "after a backward": UnfrozenAfterABackward,
    "in a step": UnfrozenInAStep,
    "freeze": FrozenAtAnEpoch,
    "freeze a batch": FrozenBeforeABatch,
    "all": AllFrozenAtFirst,
    "group": InAGroupOfItsOwn,
}
CASES = {
    **{name: (kind, {}) for name, kind in KINDS.items()},
    **{(name, "accumulated"): (kind, {"accumulate_grad_batches": 2}) for name, kind in KINDS.items()},
    "uneven": (UnfrozenAtAnEpoch, {"size": 5}),
}
STRATEGIES = {
    "ddp": DDPStrategy,
    "zero": ZeroStrategy,
    "no views": partial(DDPStrategy, gradient_as_bucket_view=False, find_unused_parameters=True),
    "static": partial(ZeroStrategy, ddp=DDPOptions(static_graph=True)),
}


PAIRS = [
    *((name, strategy) for name in CASES for strategy in ("ddp", "zero") if strategy == "ddp" or name in KINDS),
    *(((name, "accumulated"), "zero") for name in KINDS if IS_SWEEP or name.startswith("freeze")),
    ("uneven", "zero"),
    *dealt(list(KINDS), ["no views", "static"], (0,)),
]


def train_each():
    calm_down()
    found = {}
    for name, strategy in PAIRS:
        kind, settings = CASES[name]
        found[name, strategy] = fit(kind, **settings, strategy=STRATEGIES[strategy]())
    found["loop"] = loop()
    return found


def refuse(kind):
    calm_down()
    with pytest.raises(ModuleError) as caught:
        fit(kind, strategy=DDPStrategy(timeout=timedelta(seconds=10)))
    return str(caught.value)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:All 4 parameters:UserWarning")
def test_what_is_frozen_or_unfrozen_trains_as_in_one_process():
    expected = {name: fit(kind, **settings) for name, (kind, settings) in CASES.items()}
    expected["loop"] = loop()
    for found in run_ranks(train_each, 2):
        for key, parameters in found.items():
            name = key if key == "loop" else key[0]
            torch.testing.assert_close(parameters, expected[name], rtol=0, atol=1e-12, msg=f"{key}: {{}}".format)


@pytest.mark.slow
def test_ranks_that_freeze_other_parameters_are_told_which():
    first, second = run_ranks(refuse, 2, OtherOnEachRank)
    assert "Rank 0 unfroze backbone.bias, but rank 1 unfroze backbone.weight at this step" in first
    assert "Rank 1 unfroze backbone.weight, but rank 0 unfroze backbone.bias at this step" in second
    for message in run_ranks(refuse, 2, FrozenInAStep):
        assert re.match("backbone.weight, backbone.bias was frozen inside training_step", message)


@pytest.mark.slow
def test_a_rank_that_unfreezes_alone_ends_the_run_with_the_names():
    with pytest.raises(Exception, match="Rank 0 unfroze backbone.weight, backbone.bias, but rank 1 changed nothing"):
        run_ranks(refuse_alone, 2)


def refuse_alone():
    calm_down()
    fit(OnOneRank, strategy=DDPStrategy(timeout=timedelta(seconds=10)))
