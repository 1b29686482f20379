"""The matrix: every strategy (a `Line`) times every way of training (a `Case`), each compared with one process."""

import ctypes
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset
from two_nodes import two_nodes

from echelon import LocalSGDStrategy, Loss, Strategy, Trainer, TrainModule, seed_everything
from echelon.testing import run_ranks

GLOBAL_BATCH = 24
CLONE_NEWNET = 0x40000000
EVEN, UNEVEN, ONE_LEFT = 72, 61, 49
"""Training samples: three whole global batches; with a rest of 13; with a rest of one, less than there are ranks."""


@dataclass(frozen=True)
class Case:
    """One way of training."""

    optimizer: str = "adamw"
    accumulate: int = 1
    samples: int = UNEVEN
    clip: float | None = None
    units: bool = False
    """Whether the loss is a `Loss`, whose units differ by sample; the first samples have none."""
    cut: int | None = None
    """The batch size where ``global_batch_size`` is given, and does not divide by it."""
    precision: str = "64-true"

    @property
    def title(self):
        """What the table and the ids of tests call it."""
        data = {EVEN: "even", UNEVEN: "uneven", ONE_LEFT: "one left"}[self.samples]
        parts = [self.optimizer, f"accumulate {self.accumulate}" if self.cut is None else f"cut in {self.cut}s", data]
        parts += ["clip"] * (self.clip is not None) + ["units"] * self.units
        return ", ".join(parts + ["float32"] * (self.precision == "32-true"))

    @property
    def bound(self):
        """How much a parameter may differ."""
        if self.precision == "64-true":
            return 1e-12
        # Adam normalises gradients near zero, and with them their noise, up to the learning rate
        return 1e-6 if self.optimizer == "sgd" else 1e-4


CASES = [
    *(Case(*parts) for parts in product(("sgd", "adamw"), (1, 2), (EVEN, UNEVEN), (None, 0.05))),
    *(Case("adamw", accumulate, ONE_LEFT) for accumulate in (1, 2)),
    *(Case("sgd", accumulate, UNEVEN, clip, units=True) for accumulate, clip in product((1, 2), (None, 0.05))),
    Case("adamw", 2, ONE_LEFT, units=True),
    Case("adamw", cut=5),
    Case("sgd", cut=5, clip=0.05, units=True),
    Case("sgd", 2, precision="32-true"),
    Case("adamw", 2, precision="32-true"),
]


@dataclass(frozen=True)
class Line:
    """A strategy on some processes, or on some devices of one."""

    strategy: str
    processes: int = 1
    devices: int = 1
    nodes: int = 1
    note: str = ""
    make: Callable[[], Strategy] | None = None
    """Where the name alone does not do."""
    takes: Callable[[Case], bool] = lambda case: True
    """Which cases it trains."""

    @property
    def title(self):
        """What the table calls it."""
        if self.nodes > 1:
            return f"{self.strategy}, {self.nodes} nodes x {self.processes // self.nodes}"
        number = max(self.processes, self.devices)
        return self.strategy + f" x {number}" * (number > 1) + self.note

    def build(self):
        """Return the argument for the trainer, new for each run."""
        return self.strategy if self.make is None else self.make()


def is_linear(case):
    """Whether the mean of the updates that each rank makes by itself is the update with the mean of the gradients."""
    return case.optimizer == "sgd" and case.clip is None


def is_hard(case):
    """Whether ranks have different numbers of samples, in several micro-batches."""
    return case.accumulate == 2 and case.samples != EVEN


LINES = [
    Line("single"),
    Line("dp", devices=2),
    Line("ddp", 2),
    Line("ddp", 3),
    Line("ddp", 4),
    Line("ddp", 4, nodes=2),
    Line("zero", 2),
    Line("local_sgd", 2, note=", warm-up", make=lambda: LocalSGDStrategy(warmup_steps=100)),
    Line("local_sgd", 2, note=", period 1", make=lambda: LocalSGDStrategy(period=1), takes=is_linear),
    Line("fsdp", 2),
    Line("fsdp", 4, takes=is_hard),
    Line("hsdp", 4, takes=is_hard),
    Line("elastic", 2, takes=is_hard),
]


@dataclass(frozen=True)
class End:
    """What a run leaves behind."""

    state: dict[str, torch.Tensor]
    metrics: dict[str, float]
    """Of the last epoch, as a logger gets them, and of a validation and a test afterwards."""
    callback_metrics: dict[str, float]
    """In float32."""
    global_step: int
    samples_seen: int


@dataclass(frozen=True)
class Difference:
    """The largest differences between two ends."""

    state: float
    metrics: float
    callback_metrics: float
    counts: int


class Net(TrainModule):
    """A small regression with a frozen layer, tied weights and a buffer."""

    def __init__(self, case):
        super().__init__()
        self.case = case
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.net[2].weight.requires_grad_(False)
        self.tied = nn.Linear(4, 8)
        self.tied.weight = self.net[0].weight
        self.register_buffer("scale", torch.tensor([1.0, 0.5, 2.0, 1.0]))

    def forward(self, x):
        return self.net(x * self.scale) + self.tied(x).mean(dim=1, keepdim=True)

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        errors = (self(x) - y).square().squeeze(1)
        self.log("loss", errors.mean(), on_step=True, on_epoch=True)
        self.log("largest", errors.max(), reduce_fx="max", on_step=False, on_epoch=True)
        if not self.case.units:
            return errors.mean()
        units = (index % 5 * (index > 3)).to(errors.dtype)
        return Loss((errors * units).sum(), units.sum())

    def validation_step(self, batch, batch_idx):
        errors = (self(batch[0]) - batch[1]).square()
        self.log("val_loss", errors.mean())
        self.log("val_samples", float(len(errors)), reduce_fx="sum")
        self.log("one", 1.0)

    def test_step(self, batch, batch_idx):
        errors = (self(batch[0]) - batch[1]).abs()
        self.log_dict({"test_error": errors.mean(), "test_mean": self(batch[0]).mean()})

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if self.case.optimizer == "adamw":
            return torch.optim.AdamW(trained, lr=0.02, weight_decay=0.1)
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=0.05)


def samples(number, seed):
    """Samples, each with its index."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.sin(x.sum(dim=1, keepdim=True)), torch.arange(number))


def train(case, line, **where):
    """Train two epochs as the case says, evaluate, and return what is left; `where` says on which devices."""
    seed_everything(5, verbose=False)
    module = Net(case)
    if case.cut is None:
        batch_size = GLOBAL_BATCH // line.processes // case.accumulate
        cutting = {"accumulate_grad_batches": case.accumulate}
    else:
        batch_size, cutting = case.cut, {"global_batch_size": GLOBAL_BATCH}
    trainer = Trainer(
        strategy=line.build(),
        accelerator="cpu",
        precision=case.precision,
        max_epochs=2,
        gradient_clip_val=case.clip,
        log_every_n_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **cutting,
        **where,
    )
    as_precise = {"dtype": torch.float32 if case.precision == "32-true" else torch.float64}
    trained, validated, tested = (
        TensorDataset(*(part.to(**as_precise) if part.is_floating_point() else part for part in data.tensors))
        for data in (samples(case.samples, 1), samples(19, 2), samples(11, 3))
    )
    trainer.fit(module, DataLoader(trained, batch_size, shuffle=True), DataLoader(validated, 4))
    callback_metrics, metrics = plain(trainer.callback_metrics), plain(trainer.logged_metrics)
    counts = trainer.global_step, trainer.samples_seen
    state = {name: whole(value).clone() for name, value in module.state_dict().items()}
    metrics |= trainer.validate(module, DataLoader(validated, 5), verbose=False)[0]
    metrics |= trainer.test(module, DataLoader(tested, 3), verbose=False)[0]
    return End(state, metrics, callback_metrics, *counts)


def whole(tensor):
    """Return a tensor, put together if it is in shards; every rank calls it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def plain(values):
    """Return tensors as numbers."""
    return {name: value.item() for name, value in values.items()}


def train_all(line):
    """Train every case of the line in a process of it; return what each leaves."""
    where = {"devices": line.devices if line.processes == 1 else "auto"}
    return {case: train(case, line, **where) for case in CASES if line.takes(case)}


def run(line):
    """Return what each case of the line leaves on each rank."""
    if line.processes == 1:
        return by_case([train_all(line)])
    if line.nodes == 1:
        return by_case(run_ranks(train_all, line.processes, line, timeout=100))
    with two_nodes() as nodes:
        return by_case(run_ranks(train_on_node, line.processes, line, nodes, timeout=100))


def train_on_node(line, nodes):
    """Train every case of the line in a process that moves to its node: a new one would import torch first."""
    rank, on_each = int(os.environ["RANK"]), line.processes // len(nodes)
    node = nodes[rank // on_each]
    with open(f"/run/netns/{node.namespace}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot move to {node.namespace}")
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": line.processes,
        "LOCAL_RANK": rank % on_each,
        "LOCAL_WORLD_SIZE": on_each,
        "GROUP_RANK": rank // on_each,
        "GROUP_WORLD_SIZE": len(nodes),
        "MASTER_PORT": 29511,
    }
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC_") or name.endswith("_SOCKET_IFNAME")]:
        del os.environ[name]
    os.environ.update({name: str(number) for name, number in numbers.items()}, MASTER_ADDR=node.main_address)
    return train_all(line)


def by_case(ranks):
    """Return, for each case, what the ranks have left."""
    return {case: [rank[case] for rank in ranks] for case in ranks[0]}


def compare(end, expected):
    """Return how far an end is from another one."""
    return Difference(
        largest(end.state, expected.state),
        largest(end.metrics, expected.metrics),
        largest(end.callback_metrics, expected.callback_metrics),
        abs(end.global_step - expected.global_step) + abs(end.samples_seen - expected.samples_seen),
    )


def largest(found, expected):
    """Return the largest difference between things of the same names; infinity where they have others."""
    if found.keys() != expected.keys():
        return math.inf
    return max(torch.as_tensor(found[name] - value).abs().max().item() for name, value in expected.items())
