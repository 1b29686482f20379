"""The state of an optimizer that servers hold: hooks reset it, and it comes home where the process goes on."""

import os
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import ModuleError, ParameterServerStrategy, ProcessError, RunError, Trainer, TrainModule, seed_everything
from echelon.strategies.servers.served_state import ServedState
from echelon.testing import run_ranks


class Net(TrainModule):
    """Has momentum, which a hook resets or edits in the second epoch."""

    def __init__(self, does="nothing"):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        self.does = does

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def on_train_start(self):
        self.empty = self.optimizers().optimizer.state_dict()

    def on_train_epoch_start(self):
        optimizer = self.optimizers().optimizer
        if self.current_epoch != 1:
            return
        if self.does == "clear":
            optimizer.state.clear()
        elif self.does == "replace":
            optimizer.state = defaultdict(dict)
        elif self.does == "load":
            optimizer.load_state_dict(self.empty)
        elif self.does == "edit":
            optimizer.state[self.net[0].weight]["momentum_buffer"].zero_()
        elif self.does == "lose":
            self.trainer.strategy.rpc_async("server0", os._exit, (3,))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def fit(strategy, does="nothing", max_epochs=3, ckpt_path=None):
    seed_everything(4, verbose=False)
    module = Net(does)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices="auto",
        precision="64-true",
        max_epochs=max_epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(torch.randn(24, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    try:
        trainer.fit(module, DataLoader(data, 8, shuffle=True), ckpt_path=ckpt_path)
    except ProcessError:
        assert does == "lose"
    return trainer, module


def same(found, expected):
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(
            found.state_dict()[name], value, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("does", ["clear", "replace", "load"])
def test_a_state_that_a_hook_resets_is_reset_on_the_servers(does):
    (_, alone), (_, served), (_, undisturbed) = fit("single", does), fit("ps", does), fit("single")
    same(served, alone)
    assert not torch.equal(served.net[0].weight, undisturbed.net[0].weight)


def test_an_edit_of_what_is_on_a_server_is_refused():
    with pytest.raises(ModuleError, match=r"holds the optimizer's state of net.0.weight on a server.*state.clear\(\)"):
        fit("ps", "edit")


@pytest.mark.parametrize("strategy", ["ps", pytest.param("single", marks=pytest.mark.only_in_sweep)])
def test_a_checkpoint_that_is_saved_after_a_fit_in_this_process_has_the_state_of_the_optimizer(strategy, tmp_path):
    trainer, module = fit("ps", max_epochs=2)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    _, resumed = fit(strategy, ckpt_path=tmp_path / "after.ckpt")
    same(resumed, fit("single")[1])
    [optimizer] = trainer.optimizers
    before = module.net[0].weight.detach().clone()
    optimizer.step()  # its own again
    assert not torch.equal(module.net[0].weight, before)


def test_a_checkpoint_without_the_state_that_was_lost_with_a_server_is_refused(tmp_path):
    trainer, _ = fit(ParameterServerStrategy(), "lose")
    with pytest.raises(RunError, match="lost with a server"):
        trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert not (tmp_path / "after.ckpt").exists()
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)


def save_where_rank_1_has_lost_its_state(folder):
    trainer, _ = fit("ps", max_epochs=1)
    [optimizer] = trainer.optimizers
    if trainer.global_rank == 1:
        optimizer.state = ServedState(optimizer.state, {})  # as it is left where servers no longer answer
    with pytest.raises(RunError, match="lost with a server"):
        trainer.save_checkpoint(Path(folder) / "after.ckpt")


def test_a_state_that_one_trainer_has_lost_is_refused_on_all(tmp_path):
    run_ranks(save_where_rank_1_has_lost_its_state, 2, tmp_path, timeout=300)
