"""Sharding what cannot be sharded, or using a shard as a whole, is an error on every rank that says what to do."""

import os

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Trainer, TrainModule
from echelon.common.errors import ConfigError, EchelonError, ModuleError
from echelon.strategies.fsdp import FSDPStrategy
from echelon.testing import run_ranks


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def training_step(self, batch, batch_idx):
        x = self.first(batch[0])
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class UsesWeightOfAUnit(Net):
    def training_step(self, batch, batch_idx):
        return (self.first(batch[0]) @ self.blocks[0].weight.T).mean()


class CallsALayerBetweenSteps(Net):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.last(torch.ones(1, 4))


class LimitsNormsInPlace(Net):
    def on_before_optimizer_step(self, optimizer):
        for parameter in self.parameters():
            parameter.grad.norm().clamp_(max=1.0)


class CreatesAParameter(Net):
    def configure_optimizers(self):
        self.late = nn.Parameter(torch.ones(3))
        return super().configure_optimizers()


class BuildsItsOptimizerEarly(Net):
    def __init__(self):
        super().__init__()
        self.early = [torch.optim.SGD(self.parameters(), lr=0.1)]

    def configure_optimizers(self):
        return self.early[0]


class MixesOldParametersIn(Net):
    def __init__(self):
        super().__init__()
        self.old = (self.first.weight,)

    def configure_optimizers(self):
        return torch.optim.SGD([*self.old, *self.last.parameters()], lr=0.1)


class UsesLBFGS(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class MakesShardsOfItsBatch(Net):
    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        from torch.distributed.tensor import DeviceMesh, distribute_tensor

        return [distribute_tensor(batch[0], DeviceMesh("cpu", [0, 1]))]


class ShardsItself(Net):
    def configure_sharding(self, mesh):
        from torch.distributed.fsdp import fully_shard

        fully_shard(self, mesh=mesh)


class ShardsItsBlocks(Net):
    def configure_sharding(self, mesh):
        from torch.distributed.fsdp import fully_shard

        for block in self.blocks:
            fully_shard(block, mesh=mesh)


class HasALazyLayer(Net):
    def __init__(self):
        super().__init__()
        self.lazy = nn.LazyLinear(3)


class IsOnMeta(Net):
    def __init__(self):
        with torch.device("meta"):
            super().__init__()


class ReadsWhatItBuilds(Net):
    def configure_model(self):
        self.head = nn.Linear(4, 1 + int(torch.rand(1).item()))


class TiesChildrenManually(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.blocks[1].weight = self.blocks[0].weight


USED_A_SHARD = "while this rank had only its shard.*print strategy.plan"
MISTAKES = [
    (UsesWeightOfAUnit, {}, RuntimeError, USED_A_SHARD),
    (CallsALayerBetweenSteps, {}, RuntimeError, USED_A_SHARD),
    (LimitsNormsInPlace, {}, RuntimeError, "aten.clamp_.*does not know this operation on them; use strategy='ddp'"),
    (
        CreatesAParameter,
        {},
        ModuleError,
        "late of .*was added after the module was sharded.*in __init__ or configure_model",
    ),
    (BuildsItsOptimizerEarly, {}, ModuleError, "none of which is the module's.*build it in configure_optimizers"),
    (MixesOldParametersIn, {}, ModuleError, r"1 of 3 parameters.*\(4, 3\).*built before the module was sharded"),
    (UsesLBFGS, {}, ConfigError, "cannot train with LBFGS.*strategy='ddp'"),
    (MakesShardsOfItsBatch, {}, ModuleError, r"shape \(2, 3\) that is a DTensor; move it in transfer_batch_to_device"),
    (ShardsItself, {}, ConfigError, "the module itself is one of them; let it shard submodules only"),
    (ShardsItsBlocks, {"policy": nn.Linear}, ConfigError, "shards 2 modules, but policy=.*leave policy out"),
    (HasALazyLayer, {}, ModuleError, "lazy.weight.* has no shape yet.*call the module once"),
    (IsOnMeta, {}, ModuleError, "blocks.0.bias.*is on the meta device and has no values.*set deferred_init=True"),
    (ReadsWhatItBuilds, {"deferred_init": True}, ModuleError, "configure_model reads values.*build that layer in"),
    (TiesChildrenManually, {}, ModuleError, "blocks.0.weight.* to several.*put each parameter into one child"),
    (Net, {"policy": nn.Conv2d}, ConfigError, "matches no submodule of Net.*it has Linear, ModuleList"),
    (Net, {"policy": "block"}, ConfigError, "policy must be module classes, .* got 'block'; give one of these"),
    (Net, {"replicate": 3}, ConfigError, r"replicate must divide world_size=2, got 3; give one of \[1, 2\]"),
    (Net, {"reshard_after_forward": 3}, ConfigError, "must divide dp_shard=2, got 3; give one of True, False"),
    (Net, {"backward_prefetch": -1}, ConfigError, "backward_prefetch must be >= 0, got -1; give a number of units"),
]


def fit(kind, options, number=8):
    module = kind()
    trainer = Trainer(
        strategy=FSDPStrategy(**options),
        accelerator="cpu",
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(number, 3)), 2))


def make_mistakes():
    """Return the error of each mistake, with its notes."""
    found = []
    for kind, options, *_ in MISTAKES:
        try:
            fit(kind, options)
        except (EchelonError, RuntimeError) as error:
            notes = getattr(error, "__notes__", [])
            found.append((type(error), " ".join([str(error), *notes])))
        else:
            found.append((None, "nothing was raised"))
    return found


@pytest.fixture(scope="module")
def found():
    return run_ranks(make_mistakes, 2)


@pytest.mark.parametrize(
    ("at", "kind", "text"),
    [(at, kind, text) for at, (_, _, kind, text) in enumerate(MISTAKES)],
    ids=[f"{kind.__name__} {list(options) or ''}" for kind, options, *_ in MISTAKES],
)
def test_a_mistake_is_named_on_every_rank(at, kind, text, found):
    for rank in found:
        raised, message = rank[at]
        assert raised is kind, message
        with pytest.raises(kind, match=f"(?s){text}"):
            raise kind(message)


def test_fewer_samples_than_ranks_are_enough():
    run_ranks(fit, 2, Net, {}, 1)


def test_a_run_of_one_process_shards_nothing():
    assert "RANK" not in os.environ
    fit(Net, {})
