"""Optimizers train parameters of the module only, since ranks and checkpoints share no others."""

import pytest
import torch
from as_rank import calm_down, double_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import ModelCheckpoint, TrainModule
from echelon.common.errors import EchelonError
from echelon.testing import run_ranks


class Criterion:
    """A loss with a weight, which is no module."""

    def __init__(self):
        self.scale = nn.Parameter(torch.ones(2, dtype=torch.float64))


class Net(TrainModule):
    def __init__(self, is_trained=True):
        super().__init__()
        self.layer, self.losses, self.more = nn.Linear(1, 1), [nn.Linear(1, 1).double()], Criterion()
        self.more.scale.requires_grad_(is_trained)
        self.losses[0].requires_grad_(is_trained)

    def training_step(self, batch, batch_idx):
        return (self.losses[0](self.layer(batch[0])) * self.more.scale).square().mean()

    def configure_optimizers(self):
        own = [*self.layer.parameters(), *self.losses[0].parameters(), self.more.scale]
        return torch.optim.SGD(own, lr=0.1)


class ByHand(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


def fit(module, **settings):
    trainer = double_trainer(max_epochs=1, **settings)
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(8, 1, dtype=torch.float64)), 2))
    return trainer


def errors():
    calm_down()
    found = {}
    cases = {name: (Net, name) for name in ("ddp", "zero", "local_sgd", "fsdp")} | {"by hand": (ByHand, "ddp")}
    for name, (kind, strategy) in cases.items():
        try:
            fit(kind(), strategy=strategy)
        except EchelonError as error:
            found[name] = str(error)
    fit(Net(is_trained=False), strategy="ddp")
    return found


def test_several_ranks_refuse_to_train_parameters_that_are_not_the_modules():
    for found in run_ranks(errors, 2):
        assert sorted(found) == ["by hand", "ddp", "fsdp", "local_sgd", "zero"]
        for error in found.values():
            assert error.startswith("3 of 5 parameters of SGD are not the module's, of shapes [(1, 1), (1,), (2,)]: ")
        assert "each of 2 ranks would train its own" in found["ddp"]


def test_one_process_trains_them_and_refuses_to_save_checkpoints_without_them(tmp_path):
    trainer = fit(Net())
    with pytest.raises(EchelonError, match=r"3 of 5 parameters of SGD are not the module's.*does not hold them"):
        trainer.save_checkpoint(tmp_path / "one.ckpt")
    with pytest.raises(EchelonError, match=r"3 of 5 parameters .*: checkpoints do not hold them, and a resumed run"):
        fit(Net(), enable_checkpointing=True, callbacks=[ModelCheckpoint(tmp_path / "others")])
    fit(Net(is_trained=False), enable_checkpointing=True, callbacks=[ModelCheckpoint(tmp_path / "frozen")])
