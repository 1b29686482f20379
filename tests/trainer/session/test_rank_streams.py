"""Hooks and updates draw the same random numbers on all ranks, and as one process does; steps draw their own."""

import random

import numpy as np
import pytest
import torch
from as_rank import calm_down, double_trainer, world_size
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import ModelCheckpoint, ParallelStrategy, TrainModule, seed_everything
from echelon.testing import run_ranks


class Model(TrainModule):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(3, 4), nn.Dropout(dropout), nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.last(self.dropout(self.first(batch[0]).tanh())).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Reset(Model):
    """Resets a layer when training begins, and when an epoch does."""

    def on_fit_start(self):
        self.last.reset_parameters()

    def on_train_epoch_start(self):
        nn.init.orthogonal_(self.first.weight)


class Resampled(Model):
    """Resets a unit after a batch, with Python's and NumPy's numbers."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            self.first.weight[random.randrange(4)] = torch.randn(3) * random.random() * np.random.rand()


class NoiseBeforeABatch(Model):
    def on_train_batch_start(self, batch, batch_idx):
        with torch.no_grad():
            self.last.weight += 0.1 * torch.randn_like(self.last.weight)


class NoiseBeforeZeroGrad(Model):
    def on_before_zero_grad(self, optimizer):
        with torch.no_grad():
            self.last.bias += 0.1 * torch.randn(1, dtype=torch.double)


class NoiseOnGradients(Model):
    def on_before_optimizer_step(self, optimizer):
        for parameter in self.parameters():
            parameter.grad += 0.1 * torch.randn_like(parameter)


class Langevin(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter += 0.1 * torch.randn_like(parameter)


class NoisyOptimizer(Model):
    def configure_optimizers(self):
        return Langevin(self.parameters(), lr=0.1)


class Manual(NoisyOptimizer):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()

    def on_after_backward(self):
        self.last.bias.grad += 0.1 * torch.randn(1, dtype=torch.double)


class DrawsInValidation(NoiseBeforeABatch):
    def validation_step(self, batch, batch_idx):
        self.log("loss", (batch[0] + torch.randn_like(batch[0])).mean())


class OnRankZero(Reset):
    """Draws a picture where it is logged."""

    def on_train_epoch_end(self):
        if self.trainer.is_global_zero:
            torch.randn(7)


class Masks(Resampled):
    """Notes the masks of its dropout."""

    def __init__(self):
        super().__init__(0.5)
        self.masks = []
        self.dropout.register_forward_hook(lambda *call: self.masks.append(call[2].ne(0).tolist()))


class Noted(Model):
    """Notes what is drawn in steps, at the start of epochs, and after batches."""

    hooks = ()

    def __init__(self):
        super().__init__()
        self.noted = {"step": [], "epoch": [], "batch": []}

    def draw(self, where):
        if where == "step" or where in self.hooks:
            self.noted[where].append((torch.rand(()).item(), random.random(), np.random.rand()))

    def training_step(self, batch, batch_idx):
        self.draw("step")
        return super().training_step(batch, batch_idx)

    def on_train_epoch_start(self):
        self.draw("epoch")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.draw("batch")


class NotedInEpochs(Noted):
    hooks = ("epoch",)


class NotedInBatches(Noted):
    hooks = ("epoch", "batch")


class Seeded(Noted):
    """Seeds all ranks alike."""

    def on_train_epoch_start(self):
        seed_everything(self.trainer.current_epoch + 5, verbose=False)


class SeededAgain(Noted):
    """Seeds all ranks as the run was."""

    def on_train_epoch_start(self):
        torch.manual_seed(3)


class SeededInABatch(Noted):
    def on_train_batch_start(self, batch, batch_idx):
        torch.manual_seed(100 + batch_idx)


class Broadcast(Noted):
    """Continues with rank 0's numbers everywhere."""

    def on_train_epoch_start(self):
        torch.set_rng_state(self.trainer.strategy.ranks.all.broadcast(torch.get_rng_state()))


def fit(kind, size=8, epochs=2, resume=None, **settings):
    seed_everything(3, verbose=False)
    module = kind()
    data = TensorDataset(torch.randn(size, 3, generator=torch.Generator().manual_seed(1)).double())
    trainer = double_trainer(max_epochs=epochs, num_sanity_val_steps=1, **settings)
    trainer.fit(module, DataLoader(data, 2 // world_size()), DataLoader(data, 2 // world_size()), ckpt_path=resume)
    weights = {name: value.detach().clone() for name, value in module.named_parameters()}
    if issubclass(kind, Noted):
        return module.noted
    return (weights, module.masks) if kind is Masks else weights


KINDS = (
    *(Reset, Resampled, NoiseBeforeABatch, NoiseBeforeZeroGrad, NoiseOnGradients),
    *(NoisyOptimizer, Manual, DrawsInValidation, OnRankZero),
)
LATER = (NoiseOnGradients, NoisyOptimizer, Resampled)
pytestmark = pytest.mark.filterwarnings("ignore:.*validation_step:UserWarning")


def train_each(folder):
    calm_down()
    strategies = {"ddp": KINDS, "zero": (Resampled,)}
    found = {(strategy, kind): fit(kind, strategy=strategy) for strategy, kinds in strategies.items() for kind in kinds}
    for kind in LATER:  # a step of three micro-batches, and a rank with fewer
        found["accumulated", kind] = fit(kind, accumulate_grad_batches=2)
        if kind is not Resampled:  # a hook that runs less often on a rank writes less often there
            found["uneven", kind] = fit(kind, 7, accumulate_grad_batches=2)
    whole = fit(Masks)
    saver = ModelCheckpoint(dirpath=folder, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    fit(Masks, callbacks=saver, enable_checkpointing=True)
    resumed = fit(Masks, resume=next(folder.glob("step=3*")))
    found["masks"] = whole, resumed
    return found


@pytest.mark.slow
def test_what_hooks_and_optimizers_draw_is_equal_on_all_ranks_and_that_of_one_process(tmp_path):
    expected = {kind: fit(kind) for kind in KINDS}
    accumulated = {kind: fit(kind, accumulate_grad_batches=2) for kind in LATER[:2]}
    first, second = run_ranks(train_each, 2, tmp_path)
    masks = [found.pop("masks") for found in (first, second)]
    for key in first:
        torch.testing.assert_close(first[key], second[key], rtol=0, atol=0, msg=f"{key}: {{}}".format)
        case, kind = key
        wanted = accumulated.get(kind) if case == "accumulated" else expected[kind]
        if case == "uneven":
            wanted = None
        if wanted is not None:
            torch.testing.assert_close(first[key], wanted, rtol=0, atol=1e-12, msg=f"{key}: {{}}".format)
    # each rank has dropped other units, also in a run that was resumed, which ends with the same bits
    for (weights, seen), (resumed, seen_later) in masks:
        assert seen[3:] == seen_later
        torch.testing.assert_close(weights, resumed, rtol=0, atol=0)
    assert masks[0][0][1] != masks[1][0][1]


NOTED = (Noted, NotedInEpochs, NotedInBatches, Seeded, SeededAgain, SeededInABatch, Broadcast)


def note_each():
    calm_down()
    return {kind: fit(kind) for kind in NOTED}


def test_rank_0_draws_in_steps_what_one_process_draws_and_seeds_of_hooks_reach_steps():
    first, second = run_ranks(note_each, 2)
    for kind in NOTED:
        one, two, alone = first[kind], second[kind], fit(kind)
        assert one["epoch"] == two["epoch"]
        assert one["batch"] == two["batch"]
        assert len(set(one["step"])) == len(alone["step"]) or kind is SeededInABatch
        if kind is NotedInBatches:  # rank 0's hooks draw other numbers than its steps, but for the first step
            assert not set(one["batch"][1:]) & set(one["step"])
        else:
            assert one["step"] == alone["step"]
            assert one["epoch"] == alone["epoch"]
        same = [a[0] == b[0] for a, b in zip(one["step"], two["step"], strict=True)]
        assert all(same) if kind in NOTED[3:] else not any(same), kind
        others = [a[1:] == b[1:] for a, b in zip(one["step"], two["step"], strict=True)]
        assert all(others) if kind is Seeded else not any(others), kind


class NotedAfterBackward(TrainModule):
    """Notes what a hook draws behind each backward, of steps with dropout."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.noted = []

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()

    def on_after_backward(self):
        self.noted.append(torch.rand(()).item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def note_in_a_pipeline():
    calm_down()
    seed_everything(3, verbose=False)
    module, data = NotedAfterBackward(), TensorDataset(torch.ones(16, 3).double())
    strategy = ParallelStrategy(pp=2, dp_replicate=2)
    double_trainer(strategy=strategy, max_epochs=2, accumulate_grad_batches=2).fit(module, DataLoader(data, 2))
    return module.noted


def test_hooks_behind_a_backward_draw_the_same_on_all_ranks_of_a_pipeline():
    first, *others = run_ranks(note_in_a_pipeline, 4)
    assert len(set(first)) == len(first) == 8
    assert all(noted == first for noted in others)
