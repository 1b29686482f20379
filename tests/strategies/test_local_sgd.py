"""LocalSGDStrategy on two and four real processes: when it equals DDP, when replicas differ, and that it resumes.

What needs several ranks runs in two launches; a test looks at what it gave on each rank.
"""

import math
import os
import warnings

import pytest
import torch
from small import quiet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import (
    Callback,
    ConfigError,
    DDPOptions,
    EchelonError,
    LocalSGDStrategy,
    Loss,
    ModelCheckpoint,
    Trainer,
    TrainModule,
    seed_everything,
)
from echelon.testing import run_ranks

GLOBAL_BATCH = 8
NUM_SAMPLES = 33
"""Four whole global batches per epoch, and a last one of one sample, of which only the first rank has any."""
NUM_STEPS = 13


class Net(TrainModule):
    def __init__(self, optimizer="sgd"):
        super().__init__()
        self.optimizer = optimizer
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=0.02)
        if self.optimizer == "momentum":
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Units(Net):
    def training_step(self, batch, batch_idx):
        counts = (batch[0][:, 0] > 0).double()
        return Loss(((self.net(batch[0]) - batch[1]).square().squeeze(1) * counts).sum(), counts.sum())


class Several(Net):
    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net[0], self.net[2])]


class Manual(Several):
    """Steps its second optimizer every other time."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        first.step()
        if self.global_step % 2:
            second.step()
        for optimizer in (first, second):
            optimizer.zero_grad()


class Branches(Net):
    """Has a layer that only some ranks use, each in some steps."""

    def __init__(self):
        super().__init__("adamw")
        self.sometimes = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        if batch[0][0, 0] > 0:
            out = out + self.sometimes(batch[0])
        return nn.functional.mse_loss(out, batch[1])


class Watch(Callback):
    """Notes after each step how far this replica is from the mean of all."""

    def __init__(self):
        self.distances = []

    def on_train_step_end(self, trainer, module):
        mine = weights(module)
        mean = trainer.strategy.all_reduce(mine, "mean")
        self.distances.append((mine - mean).abs().max().item())


def adamw():
    return Net("adamw")


def weights(module):
    return nn.utils.parameters_to_vector(p.detach() for p in module.parameters())


def fit(module, strategy, ckpt_path=None, **settings):
    changed = {
        "strategy": strategy,
        "devices": 1 if strategy == "single" else "auto",
        "precision": "64-true",
        "max_steps": NUM_STEPS,
        "limit_val_batches": 0,
    }
    trainer = quiet(**{**changed, **settings})
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, 4, generator=generator, dtype=torch.float64)
    data = TensorDataset(x, torch.sin(x.sum(dim=1, keepdim=True)))
    batch_size = GLOBAL_BATCH // int(os.environ.get("WORLD_SIZE", "1"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer.fit(module, DataLoader(data, batch_size, shuffle=True), DataLoader(data, 4), ckpt_path=ckpt_path)
    return trainer


def train(module, strategy, **settings):
    """Return the weights at the end, and how far the replicas were apart after each step."""
    seed_everything(5, verbose=False)
    module, watch = module(), Watch()
    fit(module, strategy, callbacks=[watch, *settings.pop("callbacks", [])], **settings)
    return weights(module), watch.distances


AS_DDP = {
    "averaged at every step": (Net, {"period": 1}),
    "averaged at every step, units": (Units, {"period": 1}),
    "averaged at every step, several optimizers": (Several, {"period": 1}),
    "averaged at every step, manual optimization": (Manual, {"period": 1}),
    "warm-up, AdamW": (adamw, {"warmup_steps": NUM_STEPS}),
    "warm-up, momentum": (lambda: Net("momentum"), {"warmup_steps": NUM_STEPS, "period": 2}),
    "warm-up, manual optimization": (Manual, {"warmup_steps": NUM_STEPS}),
    "first half, then every step": (Net, {"warmup_steps": 6, "period": 1}),
}


def resume(folder):
    """Return the ends of a run that is never stopped, and of one resumed from its checkpoint between averages."""

    def saver(name):
        return ModelCheckpoint(folder / name, every_n_train_steps=6, save_top_k=-1, filename="{step}")

    strategy = LocalSGDStrategy(period=4, warmup_steps=2)
    whole, distances = train(adamw, strategy, callbacks=[saver("whole")], enable_checkpointing=True)
    seed_everything(6, verbose=False)
    module, watch = adamw(), Watch()
    path = folder / "whole" / "step=6.ckpt"
    fit(module, strategy, path, callbacks=[watch, saver("resumed")], enable_checkpointing=True)
    return whole, weights(module), distances, watch.distances


def refused(strategy, **settings):
    class Search(Net):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    try:
        fit(Search(), strategy, **settings)
    except EchelonError as error:
        return f"{type(error).__name__}: {error}"
    return None


def from_ddp(folder):
    """Return how far replicas were apart in a run of local SGD resumed from a DDP checkpoint."""
    saver = ModelCheckpoint(folder / "ddp", save_last=True)
    train(adamw, "ddp", max_steps=3, callbacks=[saver], enable_checkpointing=True)
    watch = Watch()
    fit(adamw(), LocalSGDStrategy(period=4, warmup_steps=2), folder / "ddp" / "last.ckpt", callbacks=watch)
    return watch.distances


def on_two_ranks(folder):
    return {
        "as ddp": {name: train(module, LocalSGDStrategy(**options)) for name, (module, options) in AS_DDP.items()},
        "apart": train(Net, LocalSGDStrategy(period=4, warmup_steps=2)),
        "validated": train(Net, LocalSGDStrategy(period=4), limit_val_batches=1.0, val_check_interval=2),
        "branches": train(Branches, LocalSGDStrategy(period=3, ddp=DDPOptions(find_unused_parameters=True))),
        "resumed": resume(folder),
        "from ddp": from_ddp(folder),
        "refused": refused(LocalSGDStrategy()),
    }


def on_four_ranks():
    return train(Net, LocalSGDStrategy(period={2: 2, 4: 4}))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return run_ranks(on_two_ranks, 2, tmp_path_factory.mktemp("saved"))


def averaged_at(distances):
    return [step for step, distance in enumerate(distances, start=1) if distance < 1e-14]


@pytest.mark.parametrize("name", AS_DDP)
def test_it_is_ddp_in_the_warm_up_and_where_plain_sgd_is_averaged_at_every_step(two_ranks, name):
    module, _ = AS_DDP[name]
    expected, _ = train(module, "single")
    for ends in two_ranks:
        end, distances = ends["as ddp"][name]
        assert (end - expected).abs().max() <= 1e-12
        assert max(distances) <= 1e-14


def test_replicas_differ_between_averages_and_are_equal_at_the_end(two_ranks):
    ends = [one["apart"] for one in two_ranks]
    for _, distances in ends:
        assert averaged_at(distances) == [1, 2, 3, 7, 11]
    assert torch.equal(ends[0][0], ends[1][0])


def test_the_steps_are_not_those_of_ddp(two_ranks):
    expected, _ = train(Net, "single")
    assert 1e-6 < (two_ranks[0]["apart"][0] - expected).abs().max() < 0.5


def test_replicas_are_averaged_before_an_evaluation(two_ranks):
    for ends in two_ranks:
        _, distances = ends["validated"]
        assert averaged_at(distances) == [1, 2, 4, 5, 7, 9, 12, 13]


def test_replicas_with_other_unused_parameters_are_averaged(two_ranks):
    ends = [one["branches"] for one in two_ranks]
    assert torch.equal(ends[0][0], ends[1][0])
    assert averaged_at(ends[0][1]) == [1, 4, 7, 10, 13]


def test_a_resumed_run_averages_when_and_what_the_whole_one_does(two_ranks):
    for ends in two_ranks:
        whole, resumed, distances, later = ends["resumed"]
        assert (whole - resumed).abs().max() <= 1e-12
        assert later == pytest.approx(distances[6:], abs=1e-12)
        assert averaged_at(later) == [1, 5]


def test_a_checkpoint_of_another_strategy_begins_the_warm_up(two_ranks):
    for ends in two_ranks:
        assert averaged_at(ends["from ddp"]) == [1, 2, 3, 7]


def test_an_optimizer_that_evaluates_the_loss_is_refused(two_ranks):
    for ends in two_ranks:
        assert ends["refused"].startswith("ConfigError: strategy='local_sgd' does not work with LBFGS")


def test_neighbours_may_average_more_often_than_all():
    distances = [one[1] for one in run_ranks(on_four_ranks, 4)]
    assert [averaged_at(one) for one in distances] == [[1, 5, 9, 13]] * 4
    apart = [2, 4, 6, 8, 10, 12]
    for step in apart:
        assert not math.isclose(distances[0][step - 1], distances[1][step - 1])
    for step in (3, 7, 11):
        assert math.isclose(distances[0][step - 1], distances[1][step - 1], rel_tol=1e-9)


def test_on_one_process_it_is_one_process():
    assert torch.equal(train(Net, LocalSGDStrategy(period={2: 2}))[0], train(Net, "single")[0])


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        ({"period": 0}, {}, "period must be >= 1, got 0; give the number"),
        ({"period": {}}, {}, "period must be >= 1, got {}; give the number"),
        ({"period": {2: 3, 4: 2}}, {}, "divide world_size=2, got .*; give such numbers, and 2 for the longest"),
        ({"period": {2: 1}}, {}, "must average over numbers of ranks that divide world_size=2"),
        ({"warmup_steps": -1}, {}, "warmup_steps must be >= 0, got -1; give a number"),
        ({}, {"precision": "16-mixed"}, "precision='16-mixed', which skips steps"),
        ({"ddp": DDPOptions(static_graph=True)}, {}, "static_graph=True, which needs the gradients"),
        ({"ddp": DDPOptions(sync_batchnorm=True)}, {}, "sync_batchnorm=True needs GPUs"),
    ],
)
def test_what_cannot_be_is_refused_before_a_process_starts(options, settings, message):
    with pytest.raises(ConfigError, match=message):
        Trainer(strategy=LocalSGDStrategy(**options), accelerator="cpu", devices=2, **settings)
