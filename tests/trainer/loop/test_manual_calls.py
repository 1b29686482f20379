"""Gradients of manual optimization come from `manual_backward`, or an error names the first that does not."""

import re

import pytest
import torch
from as_rank import calm_down, double_trainer, world_size
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import TrainModule, seed_everything
from echelon.common.errors import ModuleError
from echelon.testing import run_ranks


class Manual(TrainModule):
    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.compute(self.last(self.first(batch[0])).square().mean(), batch_idx)
        optimizer.step()

    def compute(self, loss, batch_idx):
        self.manual_backward(loss)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OfTheLoss(Manual):
    def compute(self, loss, batch_idx):
        loss.backward()


class OfAutograd(Manual):
    def compute(self, loss, batch_idx):
        torch.autograd.backward(loss)


class OneOfTwo(Manual):
    """Computes gradients of one loss well, and of another one not."""

    def compute(self, loss, batch_idx):
        self.manual_backward(loss / 2, retain_graph=True)
        (loss / 2).backward()


class Later(Manual):
    def compute(self, loss, batch_idx):
        if batch_idx:
            loss.backward()
        else:
            self.manual_backward(loss)


class Assigned(Manual):
    """Assigns gradients that it reduces itself, as one process has them."""

    def compute(self, loss, batch_idx):
        parameters = list(self.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = self.trainer.strategy.all_reduce(gradient, "mean") if world_size() > 1 else gradient


def fit(kind, **settings):
    seed_everything(3, verbose=False)
    module = kind()
    data = TensorDataset(torch.randn(8, 3, generator=torch.Generator().manual_seed(1)))
    if settings.get("precision") != "16-mixed":
        data = TensorDataset(data.tensors[0].double())
    double_trainer(max_epochs=1, **settings).fit(module, DataLoader(data, 2 // world_size()))
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def message_of(kind, **settings):
    with pytest.raises(ModuleError) as caught:
        fit(kind, **settings)
    return str(caught.value)


STRATEGIES = ("ddp", "zero", "fsdp")
MISTAKES = (OfTheLoss, OfAutograd)


def train_each():
    calm_down()
    found = {(strategy, kind): message_of(kind, strategy=strategy) for strategy in STRATEGIES for kind in MISTAKES}
    found |= {(strategy, OneOfTwo): message_of(OneOfTwo, strategy=strategy) for strategy in ("ddp", "zero")}
    return found, message_of(Later), [fit(Assigned), fit(Manual)]


def test_a_backward_of_the_users_own_is_refused_where_ranks_share_the_step():
    expected = fit(Manual)
    for messages, later, trained in run_ranks(train_each, 2):
        for key, message in messages.items():
            assert re.match(r"The gradient of (first|last)\.\w+ was computed with backward\(\) instead of", message), (
                key
            )
            assert "Call self.manual_backward(loss)" in message
        assert re.match("Replicas differ after global_step 4: the parameter first", later)
        for parameters in trained:
            torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-12)


def test_a_backward_of_the_users_own_is_refused_where_losses_are_scaled_and_works_otherwise():
    for kind in (*MISTAKES, OneOfTwo, Later):
        assert "precision scales losses" in message_of(kind, precision="16-mixed")
        torch.testing.assert_close(fit(kind), fit(Manual), rtol=0, atol=1e-12)


class LeavesOut(Manual):
    """Leaves out the update of a batch after its gradients were unscaled."""

    left_out = None

    def __init__(self):
        super().__init__()
        self.norms = []

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.last(self.first(batch[0])).square().mean())
        self.clip_gradients(optimizer, gradient_clip_val=1e9, gradient_clip_algorithm="norm")
        self.norms.append(float(self.last.weight.grad.norm()))
        if batch_idx != self.left_out:
            optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class LeavesOutOne(LeavesOut):
    left_out = 1


def test_gradients_after_an_update_that_was_left_out_are_unscaled(tmp_path):
    norms = []
    for kind in (LeavesOut, LeavesOutOne):
        seed_everything(3, verbose=False)
        module, data = kind(), torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
        trainer = double_trainer(max_epochs=1, precision="16-mixed", default_root_dir=tmp_path)
        trainer.fit(module, DataLoader(TensorDataset(0.01 * data), 2))
        norms.append(module.norms[1:])  # the first loss is scaled too much
    assert norms[0] == norms[1]
    assert all(0 < norm < 1 for norm in norms[0])
