"""Parameters that a hook exchanges, and steps that the module makes itself, on servers as in one process."""

import pytest
import torch
from small import quiet, raises
from sweep import dealt
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import ConfigError, ModuleError, ParameterServerStrategy, TrainModule, seed_everything

CLIP = 0.05


class Net(TrainModule):
    """Has an optimizer with a state."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

    def training_step(self, batch, batch_idx):
        return (self.net(batch[0]) - 2).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.05)


class Exchanges(Net):
    def on_train_epoch_start(self):
        if self.current_epoch != 1:
            return
        group = self.optimizers().optimizer.param_groups[0]
        new = nn.Parameter(torch.ones_like(self.net[0].weight))
        group["params"] = [new if p is self.net[0].weight else p for p in group["params"]]
        self.net[0].weight = new


class StepsTwice(Net):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(optimizer_closure)
        optimizer.step()


class StepsAnew(Net):
    """Makes its second step of other gradients, which nobody clips."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(optimizer_closure)
        for parameter in self.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()


class Edits(Net):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        for parameter in self.net[0].parameters():
            parameter.grad.mul_(0.5)


class Unsendable(Net):
    def configure_optimizers(self):
        return torch.optim.SGD([{"params": self.parameters(), "weigh": lambda x: x}], 0.1)


class UnsendableLater(Net):
    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.optimizers().optimizer.param_groups[0]["weigh"] = lambda x: x


def fit(strategy, make, algorithm=None):
    seed_everything(4, verbose=False)
    module = make()
    trainer = quiet(
        strategy=strategy,
        devices=1 if strategy == "single" else 2,
        precision="64-true",
        max_epochs=3,
        gradient_clip_val=algorithm and CLIP,
        gradient_clip_algorithm=algorithm,
        global_batch_size=8,
    )
    data = TensorDataset(torch.randn(24, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    trainer.fit(module, DataLoader(data, 4))
    return module.state_dict()


CASES = [
    (Exchanges, None),
    (StepsTwice, None),
    (StepsTwice, "norm"),
    (StepsTwice, "value"),
    (StepsAnew, "norm"),
    (StepsAnew, "value"),
    (Edits, "norm"),
]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("make", "algorithm", "servers"), [(*case, number) for case, number in dealt(CASES, (2, 1), [0])]
)
def test_steps_are_those_of_one_process(make, algorithm, servers):
    found = fit(ParameterServerStrategy(servers), make, algorithm)
    for name, value in fit("single", make, algorithm).items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


def test_gradients_that_are_edited_after_servers_clip_them_by_value_are_refused():
    with raises(ModuleError, "clips by value the mean of all trainers' gradients", "clip by norm"):
        fit("ps", Edits, "value")


@pytest.mark.parametrize("make", [Unsendable, UnsendableLater])
def test_a_setting_of_a_group_that_cannot_be_sent_is_named(make):
    with raises(ConfigError, "'weigh' in group 0 of SGD" if make is Unsendable else "'weigh' in group 0 of Adam"):
        fit("ps", make)
