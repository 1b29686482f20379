"""An optimizer that draws random numbers draws on a server what it would draw in one process, also when it goes on."""

import pytest
import torch
from as_rank import double_trainer, world_size
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon import ModelCheckpoint, ParameterServerStrategy
from echelon.testing import run_ranks


class Noisy(torch.optim.SGD):
    """Adds noise to each update, as Langevin dynamics does; a step draws more in some steps than in others."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=0.01)
            group["lr"] *= 1.0 + 0.1 * torch.rand(()).item()
        return loss


class Net(echelon.TrainModule):
    """Draws in a hook as well, between the steps."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 3), nn.Dropout(dropout), nn.Linear(3, 1))
        self.drawn = []

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.drawn.append(torch.rand(()).item())

    def configure_optimizers(self):
        return Noisy(self.parameters(), lr=0.01)


def trained(seed, strategy, dropout=0.0, **settings):
    """Return the weights, the rate and what the hook has drawn."""
    echelon.seed_everything(seed, verbose=False)
    module = Net(dropout)
    data = TensorDataset(torch.randn(16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    ckpt_path = settings.pop("ckpt_path", None)
    trainer = double_trainer(strategy=strategy, global_batch_size=4, **{"max_epochs": 2, **settings})
    trainer.fit(module, DataLoader(data, 4 // world_size()), ckpt_path=ckpt_path)
    weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    return weights, trainer.optimizers[0].param_groups[0]["lr"], module.drawn


def servers():
    return ParameterServerStrategy(servers=1)


def check(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-14)
    assert found[1] == expected[1]
    assert found[2] and found[2] == expected[2][-len(found[2]) :]


@pytest.mark.parametrize("settings", [{}, {"gradient_clip_val": 0.5}], ids=["plain", "clipped"])
def test_one_trainer_draws_as_one_process_in_each_run(settings):
    for seed in (1, 2):  # the second server comes from the same nursery as the first
        check(trained(seed, servers(), dropout=0.5, **settings), trained(seed, "single", dropout=0.5, **settings))


def of_seeds(strategy):
    return [trained(seed, strategy()) for seed in (1, 2)]


def test_two_trainers_draw_as_one_process_in_each_run():
    expected = of_seeds(lambda: "single")
    for of_rank in run_ranks(of_seeds, 2, servers):
        for found, alone in zip(of_rank, expected, strict=True):
            check(found, alone)


def test_a_resumed_run_draws_on(tmp_path):
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole = trained(3, servers(), dropout=0.5, enable_checkpointing=True, callbacks=[saver])
    resumed = trained(9, servers(), dropout=0.5, ckpt_path=tmp_path / "step=3.ckpt")
    check(resumed, whole)
    assert len(resumed[2]) < len(whole[2])
