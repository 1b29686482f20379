"""Sharded training on real ranks ends like one process, whatever is sharded and however long it stays gathered."""

import os
import warnings
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Loss, Trainer, TrainModule, seed_everything
from echelon.strategies.fsdp import FSDPStrategy
from echelon.testing import run_ranks

GLOBAL_BATCH = 8


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 7), nn.Linear(7, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(TrainModule):
    """Two blocks whose rows no number of ranks divides; a tied head, a frozen layer, a buffer."""

    def __init__(self, case):
        super().__init__()
        self.case = case
        self.build()

    def build(self):
        self.embed, self.head = nn.Linear(3, 5), nn.Linear(3, 5, bias=False)
        self.blocks = nn.ModuleList(Block(5) for _ in range(3))
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([1.0, 0.5, 2.0]))

    def encode(self, x):
        x = self.embed(x * self.scale)
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        errors = (self.frozen(self.encode(x)) - self.head(y)).square().mean(dim=1)
        self.log("loss", errors.mean(), on_step=False, on_epoch=True)
        if not self.case.units:
            return {"loss": errors.mean(), "errors": errors.detach()}
        units = (index % 3).to(errors.dtype)
        return Loss((errors * units).sum(), units.sum())

    def validation_step(self, batch, batch_idx):
        self.log("val", (self.encode(batch[0]) - 1).square().mean())
        self.log("samples", float(len(batch[0])), reduce_fx="sum")

    def predict_step(self, batch, batch_idx):
        return self.blocks[0](self.embed(batch[0]))

    def configure_optimizers(self):
        kind, options = (
            (torch.optim.AdamW, {"lr": 0.02}) if self.case.optimizer == "adamw" else (torch.optim.SGD, {"lr": 0.1})
        )
        if self.case.num_optimizers == 1:
            return kind(self.parameters(), **options)
        first = kind(self.blocks.parameters(), **options)
        return [first, torch.optim.SGD(self.embed.parameters(), lr=0.05, momentum=0.9)]


class ShardsItself(Net):
    def configure_sharding(self, mesh):
        from torch.distributed.fsdp import fully_shard

        for block in self.blocks:
            fully_shard(block.down, mesh=mesh)
            fully_shard(block, mesh=mesh)


class CompilesBlocks(Net):
    def __init__(self, case):
        super().__init__(case)
        for block in self.blocks:
            block.compile(backend="eager")


class BuiltLate(TrainModule):
    """Built where the strategy says, with layers that are initialized twice, or in their own ways."""

    configure_optimizers, predict_step = Net.configure_optimizers, Net.predict_step
    training_step, validation_step, encode = Net.training_step, Net.validation_step, Net.encode

    def __init__(self, case):
        super().__init__()
        self.case = case

    def configure_model(self):
        if hasattr(self, "embed"):
            return
        Net.build(self)
        self.apply(self.initialise)
        nn.init.trunc_normal_(self.blocks[0].up.weight)
        nn.init.orthogonal_(self.blocks[1].up.weight)
        with torch.no_grad():
            self.blocks[2].down.weight.mul_(0.5)

    def initialise(self, part):
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.normal_(part.weight, std=0.3)


class Manual(Net):
    """Two updates of two optimizers a batch, whose gradients go through parts in turn."""

    def __init__(self, case):
        super().__init__(case)
        self.automatic_optimization = False
        self.head = nn.Linear(5, 3)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        for optimizer in (first, second):
            optimizer.zero_grad()
            with self.toggled_optimizer(optimizer):
                self.manual_backward(self.encode(batch[0]).square().mean())
            optimizer.step()


@dataclass(frozen=True)
class Case:
    """A strategy, and a way of training that one process knows as well."""

    strategy: dict = field(default_factory=dict)
    optimizer: str = "adamw"
    accumulate: int = 1
    samples: int = 21
    clip: float | None = None
    clip_by: str = "norm"
    units: bool = False
    num_optimizers: int = 1
    kind: type = Net
    trainer: dict = field(default_factory=dict)
    epochs: int = 1


def by_name(name, part):
    return name.endswith("up")


CASES = {
    "units by size, two epochs": Case({"policy": 40}, epochs=2),
    "units, accumulated and clipped by norm": Case(clip=0.05, units=True, accumulate=2),
    "one sample left": Case(samples=17, accumulate=2),
    "one sample left, synced each time": Case({"sync_each_micro_batch": True}, samples=17, accumulate=2),
    "two optimizers, clipped by value": Case(num_optimizers=2, clip=0.01, clip_by="value", optimizer="sgd"),
    "replicas": Case({"replicate": 2}, accumulate=2, clip=0.05),
    "units by name, kept after forward": Case({"policy": by_name, "reshard_after_forward": False}, accumulate=2),
    "units by class, prefetched": Case({"policy": (nn.Linear, Block), "forward_prefetch": 2, "backward_prefetch": 2}),
    "offloaded, synced each time": Case({"cpu_offload": True, "sync_each_micro_batch": True}, accumulate=2, clip=0.05),
    "sharded by itself": Case(kind=ShardsItself),
    "recomputed": Case(trainer={"activation_checkpointing": "full"}, accumulate=2),
    "compiled": Case(trainer={"compile": {"backend": "eager"}}),
    "compiled blocks": Case(kind=CompilesBlocks),
    "built late": Case({"deferred_init": True}, kind=BuiltLate),
    "manual": Case(kind=Manual, num_optimizers=2),
    "manual with all of a child in units": Case({"policy": (nn.Linear, nn.LayerNorm)}, kind=Manual, num_optimizers=2),
}
ON_FOUR = {
    "one sample left, synced each time": CASES["one sample left, synced each time"],
    "replicas": CASES["replicas"],
    "kept among two ranks": Case({"reshard_after_forward": 2}, accumulate=2),
}


def samples(number):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(number, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.cos(), torch.arange(number))


def make_trainer(case, **options):
    return Trainer(
        accelerator="cpu",
        precision="64-true",
        max_epochs=case.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def train(case, strategy, num_ranks, **options):
    """Return the whole weights (on the first rank) and the metrics after a fit, a validation and a prediction."""
    seed_everything(3, verbose=False)
    module = case.kind(case)
    trainer = make_trainer(
        case,
        strategy=strategy,
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.clip,
        gradient_clip_algorithm=case.clip_by,
        **case.trainer,
        **options,
    )
    batch_size = GLOBAL_BATCH // num_ranks // case.accumulate
    trainer.fit(module, DataLoader(samples(case.samples), batch_size, shuffle=True), DataLoader(samples(7), 3))
    state, metrics = trainer.strategy.full_model_state(), dict(trainer.callback_metrics)
    metrics |= trainer.validate(module, DataLoader(samples(3), 2), verbose=False)[0]
    predictions = torch.cat(trainer.predict(module, DataLoader(samples(5), 2)))
    return {
        **state,
        "predictions": predictions,
        **{k: torch.as_tensor(v, dtype=torch.float32) for k, v in metrics.items()},
    }


def train_all(cases):
    # torch 2.14 looks at the gradients of all that it compiles for
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    num_ranks = int(os.environ["WORLD_SIZE"])
    return {name: train(case, FSDPStrategy(**case.strategy), num_ranks) for name, case in cases.items()}


@pytest.fixture(scope="module")
def expected():
    """Return what one process ends with, without compiling or recomputing anything."""
    plain = {
        name: replace(case, trainer={}, kind=Net if case.kind is CompilesBlocks else case.kind)
        for name, case in (CASES | ON_FOUR).items()
    }
    return {name: train(case, "single", 1, devices=1) for name, case in plain.items()}


@pytest.fixture(scope="module")
def on_two():
    return run_ranks(train_all, 2, CASES)


@pytest.fixture(scope="module")
def on_four():
    return run_ranks(train_all, 4, ON_FOUR)


def check(ends, expected):
    assert ends[0].keys() == expected.keys()
    for end in ends:
        for name, value in end.items():  # weights are on the first rank; metrics are float32
            atol = 1e-12 if value.dtype == torch.float64 else 1e-6
            torch.testing.assert_close(value, expected[name], rtol=0, atol=atol)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_end_like_one_process(name, on_two, expected):
    check([end[name] for end in on_two], expected[name])


@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_end_like_one_process(name, on_four, expected):
    check([end[name] for end in on_four], expected[name])
