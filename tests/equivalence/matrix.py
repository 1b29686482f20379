"""The matrix: every strategy (a `Line`) with every way of training (a `Case`), each compared with one process."""

import ctypes
import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations, product

import torch
from as_rank import attempt
from pairwise import covering
from sweep import IS_SWEEP
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from two_nodes import two_nodes

from echelon import (
    DeviceMapStrategy,
    Engine,
    ExpertBalance,
    Experts,
    LocalSGDStrategy,
    Loss,
    ParallelStrategy,
    ParameterServerStrategy,
    RemoteEmbedding,
    Strategy,
    Trainer,
    TrainModule,
    seed_everything,
)
from echelon.strategies.state.dtensor import gather_whole
from echelon.testing import run_ranks

GLOBAL_BATCH = 24
CLONE_NEWNET = 0x40000000
EVEN, UNEVEN, ONE_LEFT = 72, 61, 49
"""Training samples: three whole global batches; two and a rest of 13; two and a rest of one, fewer than ranks."""


@dataclass(frozen=True)
class Case:
    """One way of training."""

    optimizer: str = "adamw"
    accumulate: int = 1
    samples: int = UNEVEN
    clip: float | None = None
    units: bool = False
    """Whether the loss is a `Loss` whose units differ by sample; the first samples have none."""
    by_engine: bool = False
    """Whether a custom loop with an `Engine` trains."""
    cut: int | None = None
    """The batch size if ``global_batch_size`` is given, which is not a multiple of it."""
    precision: str = "64-true"
    epochs: int = 2
    fewer: int = 0
    """How many samples are left out: a global batch, where `make test` is shorter than a sweep."""

    @property
    def title(self):
        """Its name in the table and in the ids of tests."""
        data = {EVEN: "even", UNEVEN: "uneven", ONE_LEFT: "one left"}[self.samples]
        parts = [self.optimizer, f"accumulate {self.accumulate}" if self.cut is None else f"cut in {self.cut}s", data]
        parts += ["clip"] * (self.clip is not None) + ["units"] * self.units
        return ", ".join(parts + ["float32"] * (self.precision == "32-true"))

    @property
    def bound(self):
        """The largest allowed difference of a parameter."""
        if self.precision == "64-true":
            return 1e-12
        # Adam scales up gradients near zero, including their noise, to the order of the learning rate
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
    """A strategy on some number of processes, or on several devices of one process."""

    strategy: str
    processes: int = 1
    devices: int = 1
    nodes: int = 1
    note: str = ""
    make: Callable[[], Strategy] | None = None
    """Makes the strategy, if its name is not enough."""
    takes: Callable[[Case], bool] = lambda case: True
    """Whether it trains a case."""
    network: str = "dense"
    """A key of `NETWORKS`."""
    sharing: int = 1
    """The number of processes that train on the same samples."""
    pieces: int = 1
    """The number of micro-batches into which each one of a case is cut."""

    @property
    def title(self):
        """Its name in the table."""
        if self.nodes > 1:
            return f"{self.strategy}, {self.nodes} nodes x {self.processes // self.nodes}"
        if not self.is_named and self.processes > 1:
            return self.strategy
        number = max(self.processes, self.devices)
        return self.strategy + f" x {number}" * (number > 1) + self.note

    @property
    def cases(self):
        """The cases that it trains, all of which are in the table."""
        return [case for case in CASES if self.takes(case)]

    @property
    def has_engine(self):
        """Whether a custom loop with an `Engine` also trains its hard cases."""
        is_small = self.nodes == 1 and (self.processes <= 2 or self.strategy == "hsdp")
        return is_small and self.network == "dense" and self.strategy in ENGINES

    @property
    def num_tested(self):
        """How many of its cases `make test` takes: the parts of a line of more than two processes have lines of two."""
        if self.title in IN_A_SWEEP:
            return 0
        if self.network == "dense":
            return 4 if self.processes == 2 and self.takes(CASES[0]) else 2
        return 1

    @property
    def start(self):
        """What it has in common with the lines whose processes start once for all of them."""
        is_alone = self.processes == 1 or self.nodes > 1
        return self.processes, self.network, self.title if is_alone else ""

    @property
    def is_named(self):
        """Whether `strategy` is the name of an Echelon strategy."""
        return self.network == "dense" or self.strategy == "pp"

    def build(self):
        """Return the trainer's `strategy` argument, made again for each run."""
        return self.strategy if self.make is None else self.make()


def is_linear(case):
    """Return whether the mean of the ranks' own updates equals the update with the mean of their gradients."""
    return case.optimizer == "sgd" and case.clip is None


def is_hard(case):
    """Return whether ranks have different numbers of samples, in several micro-batches."""
    return case.accumulate == 2 and case.samples != EVEN


def is_harder(case):
    """Return whether a hard case covers what the others do not: clipping, units, and a rest of one sample."""
    is_clipped_or_left = case.clip is not None or case.samples == ONE_LEFT
    return is_hard(case) and is_clipped_or_left and (case.units or case.optimizer == "adamw")


def is_for_engine(case):
    """Return whether a case in double precision shows how a custom loop weighs, cuts and clips."""
    return case.precision == "64-true" and (is_hard(case) or case.cut is not None)


def is_hardest(case):
    """Return whether this is the one case for layouts that need many processes."""
    return is_harder(case) and case.units and case.clip is not None


IN_A_SWEEP = (
    "ddp x 4",
    "fsdp x 4",
    "ps x 3 + 1 server",
    "tp x 4",
    "tp 2 x fsdp 2",
    "replicate 2 x tp 2",
    "replicate 2 x pp 2",
    "pp x 2, gpipe",
    "pp x 2, interleaved_1f1b",
    "pp x 2, looped_bfs",
    "pp x 4, 1f1b",
    "pp 2 x fsdp 2",
    "fsdp 2 x ep 2",
    "ep x 4",
    "replicate 2 x fsdp 2 x tp 2",
    "fsdp 2 x cp 2 x tp 2",
    "pp 2 x tp 2",
    "pp 2 x cp 2 x tp 2",
    "pp 2 x fsdp 2 x tp 2",
    "pp 2 x ep 2",
    "pp 2 x ep 2, zbv_zero_bubble",
    "pp 2 x fsdp 2 x ep 2",
)
"""Lines whose axes `make test` has in other lines in pairs, on fewer ranks or with a schedule of their kind.

Else in test_layouts_in_turn.py, test_load_matrix.py or, with experts, in tests/strategies/experts.
"""
ENGINES = ("single", "ddp", "zero", "fsdp", "hsdp", "tp")
"""The strategies that `Engine` supports."""
DENSE_PLAN = {
    "net.0": "colwise_gather_output",
    "tied": "colwise_gather_output",  # the same weight
    "net.2": "colwise",
    "net.4": "rowwise",
}
ATTENTION_PLAN = {
    "embed": "embedding_rowwise",
    "head": "colwise_gather_output",  # the same weight
    "blocks.*.qkv": "packed_colwise:3",
    "blocks.*.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}


def attention(title, processes, takes=is_harder, network="attention", **degrees):
    """Return a `ParallelStrategy` line with a network of attention blocks."""
    return Line(
        title,
        processes,
        make=lambda: ParallelStrategy(tp_plan=ATTENTION_PLAN, **degrees),
        takes=takes,
        network=network,
        sharing=degrees.get("pp", 1) * degrees.get("tp", 1) * degrees.get("cp", 1),
        pieces=2 if "pp" in degrees else 1,
    )


def stages(title, processes, takes=is_hardest, **degrees):
    """Return a `ParallelStrategy` line with a network of more blocks, in pipeline stages."""
    return attention(title, processes, takes, network="stages", **{"pp": 2, **degrees})


EXPERTS_PLAN = {name: word for name, word in ATTENTION_PLAN.items() if not name.endswith((".up", ".down"))}


def experts(title, processes, takes=is_hardest, ep=2, pieces=1, **degrees):
    """Return a `ParallelStrategy` line with a network whose blocks have experts, dealt over `ep` ranks."""
    network = "stages of experts for sequences" if "pp" in degrees else "experts for sequences"
    line = attention(title, processes, takes, network, **degrees)
    pieces = max(pieces, line.pieces)
    return replace(line, make=lambda: ParallelStrategy(tp_plan=EXPERTS_PLAN, ep=ep, **degrees), pieces=pieces)


LINES = [
    Line("single"),
    Line("dp", devices=2),
    Line("device_map", make=lambda: DeviceMapStrategy({"net.2": "cpu:0", "": "cpu"}), takes=is_hard),
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
    Line("ps", 2, note=" + 1 server"),
    Line("ps", 2, note=" + 2 servers", make=lambda: ParameterServerStrategy(2), takes=is_hard),
    Line("ps", 3, note=" + 1 server", takes=is_hard),
    Line(
        "ps x 2, tables remote",
        2,
        make=lambda: ParameterServerStrategy(dense="ddp"),
        takes=is_hard,
        network="tables",
    ),
    Line("tp", 2, make=lambda: ParallelStrategy(tp=2, tp_plan=DENSE_PLAN), takes=is_hard, sharing=2, note=", dense"),
    attention("tp x 2", 2, tp=2),
    attention("tp x 4", 4, tp=4),
    attention("tp 2 x fsdp 2", 4, tp=2, dp_shard=2),
    attention("replicate 2 x tp 2", 4, tp=2, dp_replicate=2),
    attention("tp x 2, sequence and loss parallel", 2, tp=2, sequence_parallel=True, loss_parallel=True),
    attention("replicate 2 x fsdp 2 x tp 2", 8, takes=is_hardest, tp=2, dp_shard=2, dp_replicate=2),
    attention("cp x 2", 2, network="sequences", cp=2),
    attention("cp x 2, ulysses", 2, network="sequences", cp=2, cp_exchange="ulysses"),
    attention("cp 2 x fsdp 2", 4, network="sequences", cp=2, dp_shard=2),
    attention("cp 2 x tp 2", 4, takes=is_hardest, network="sequences", cp=2, tp=2),
    attention("fsdp 2 x cp 2 x tp 2", 8, takes=is_hardest, network="sequences", cp=2, tp=2, dp_shard=2),
    stages("pp x 2, gpipe", 2, schedule="gpipe"),
    Line("pp", 2, takes=is_harder, network="stages", sharing=2, pieces=2),
    stages("pp x 2, interleaved_1f1b", 2, schedule="interleaved_1f1b"),
    stages("pp x 2, looped_bfs", 2, schedule="looped_bfs"),
    stages("pp x 2, interleaved_zero_bubble", 2, schedule="interleaved_zero_bubble"),
    stages("pp x 2, zbv_zero_bubble", 2, schedule="zbv_zero_bubble"),
    stages("pp x 2, dualpipe_v", 2, schedule="dualpipe_v"),
    stages("pp x 4, 1f1b", 4, pp=4),
    stages("pp 2 x fsdp 2", 4, dp_shard=2),
    stages("replicate 2 x pp 2", 4, dp_replicate=2),
    stages("pp 2 x tp 2", 4, tp=2),
    stages("pp 2 x fsdp 2 x tp 2", 8, tp=2, dp_shard=2),
    stages(
        "pp 2 x tp 2, zbv_zero_bubble, sequence and loss parallel",
        4,
        tp=2,
        schedule="zbv_zero_bubble",
        sequence_parallel=True,
        loss_parallel=True,
    ),
    attention("pp 2 x cp 2", 4, is_hardest, network="stages of sequences", pp=2, cp=2),
    attention("pp 2 x cp 2 x tp 2", 8, is_hardest, network="stages of sequences", pp=2, cp=2, tp=2),
    experts("ep x 2", 2, is_harder),
    experts("ep x 4", 4, ep=4),
    experts("fsdp 2 x ep 2", 4, is_harder),
    experts("replicate 2 x ep 2", 4, dp_replicate=2),
    experts("ep 2 x tp 2", 4, tp=2),
    experts("fsdp 2 x ep 2 x cp 2", 8, cp=2),
    experts("pp 2 x ep 2", 4, is_harder, pp=2),
    experts("pp 2 x ep 2, zbv_zero_bubble", 4, pp=2, schedule="zbv_zero_bubble"),
    experts("pp 2 x fsdp 2 x ep 2", 8, pp=2, pieces=3),
]
ALONE = {
    network: Line("single", note=f", {network}" if network != "dense" else "", takes=takes, network=network)
    for network, takes in {
        "dense": LINES[0].takes,
        "attention": is_harder,
        "sequences": is_harder,
        "tables": is_hard,
        "stages": is_hard,
        "stages of sequences": is_hardest,
        "experts for sequences": is_harder,
        "stages of experts for sequences": is_harder,
    }.items()
}
"""The single-process line with which the lines of each network are compared."""


def cases_of_lines():
    """Return the cases of the test for each line, then those that a custom loop with an `Engine` trains.

    In a sweep, each two settings in double precision meet in one case of every line. Else they meet in some of the
    lines: each takes its hardest case, and those whose settings have met least often in the lines before it. One
    process takes all cases. The hardest case of a plain line of two processes has two epochs, others one, and all fewer
    steps.
    """
    met, found = Counter(), {}
    for line in LINES:
        cases, by_engine = line.cases, [case for case in CASES if line.has_engine and is_for_engine(case)]
        if line.processes > 1 and not IS_SWEEP:
            cases, by_engine = dealt_cases(cases, line.num_tested, met), dealt_cases(by_engine, 2, met)
        else:
            double = [case for case in cases if case.precision == "64-true"]
            others = [case for case in cases if case not in double]
            cases = covering(double, vars) + others if line.processes > 1 else cases
            by_engine = covering(by_engine, vars)
        found[line] = tuple(
            [replace(case, by_engine=is_of_engine, **length_of(line, case)) for case in of_kind]
            for is_of_engine, of_kind in ((False, cases), (True, by_engine))
        )
    return found


def length_of(line, case):
    """Return what makes a case shorter than in a sweep."""
    if line.processes == 1 or IS_SWEEP:
        return {}
    has_two_epochs = line.processes == 2 and line.network == "dense" and is_hardest(case)
    return {"fewer": GLOBAL_BATCH, "epochs": 2 if has_two_epochs else 1}


def dealt_cases(cases, number, met):
    """Return the hardest of the cases, then those whose pairs of settings have met least often, and count these."""
    chosen = []
    for _ in range(min(number, len(cases))):
        left = [case for case in cases if case not in chosen]
        # whole numbers: the sum of others would depend on their order, which is another one in each process
        rarity = {case: sum(3 ** max(9 - met[pair], 0) for pair in pairs_of(case)) for case in left}
        chosen.append(max(left, key=lambda case: (is_hardest(case), rarity[case])))
        met.update(pairs_of(chosen[-1]))
    return chosen


def pairs_of(case):
    """Return the pairs of settings that meet in a case, in one process or more, with or without an `Engine`."""
    return {*combinations(vars(replace(case, epochs=2, fewer=0, by_engine=False)).items(), 2)}


@dataclass(frozen=True)
class End:
    """The results of a run."""

    state: dict[str, torch.Tensor]
    metrics: dict[str, float]
    """The metrics of the last epoch, as loggers get them, and of a test afterwards, and mostly a validation."""
    callback_metrics: dict[str, float]
    """These are in float32."""
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
    """The base of all networks: a loss, metrics of all stages, and an optimizer."""

    def __init__(self, case):
        super().__init__()
        self.case = case

    def errors(self, x, y):
        """Return the error of each sample, or of each of its tokens."""
        raise NotImplementedError

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        errors = self.errors(x, y)
        self.log("loss", errors.mean(), on_step=True, on_epoch=True)
        self.log("largest", errors.max(), reduce_fx="max", on_step=False, on_epoch=True)
        if not self.case.units:
            return errors.mean()
        return loss_of(errors, index)

    def validation_step(self, batch, batch_idx):
        errors = self.errors(*batch[:2])
        self.log("val_loss", errors.mean())
        self.log("val_samples", float(errors.numel()), reduce_fx="sum")
        self.log("one", 1.0)

    def test_step(self, batch, batch_idx):
        self.log_dict({"test_error": self.errors(*batch[:2]).sqrt().mean(), "test_mean": self(batch[0]).mean()})

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if self.case.optimizer == "adamw":
            return torch.optim.AdamW(trained, lr=0.02, weight_decay=0.1)
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=0.05)


class Dense(Net):
    """A small regression with a frozen layer, tied weights and a buffer."""

    def __init__(self, case):
        super().__init__(case)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.net[2].weight.requires_grad_(False)
        self.tied = nn.Linear(4, 8)
        self.tied.weight = self.net[0].weight
        self.register_buffer("scale", torch.tensor([1.0, 0.5, 2.0, 1.0]))

    def forward(self, x):
        return self.net(x * self.scale) + self.tied(x).mean(dim=1, keepdim=True)

    def errors(self, x, y):
        return (self(x) - y).square().squeeze(1)


class Attention(nn.Module):
    """A block of causal attention with a fixed head width, and a frozen and a trained layer."""

    def __init__(self):
        super().__init__()
        # the gradient of a key bias would only be noise, which AdamW amplifies
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24, bias=False), nn.Linear(8, 8)
        self.second_norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.up.requires_grad_(False)

    def forward(self, x):
        packed = self.qkv(self.norm(x))
        q, k, v = (part.unflatten(-1, (-1, 2)).transpose(1, 2) for part in packed.chunk(3, dim=-1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.second_norm(x))))


class Attending(Net):
    """A small language model: two attention blocks, a tied embedding, frozen layers and a buffer."""

    def __init__(self, case):
        super().__init__(case)
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.register_buffer("positions", torch.randn(8, 8, generator=torch.Generator().manual_seed(2)))

    def forward(self, x):
        x = self.embed(self.tokens(x)) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def errors(self, x, y):
        following = self.tokens(x).roll(-1, 1)
        losses = nn.functional.cross_entropy(self(x).flatten(0, 1), following.flatten(), reduction="none")
        return losses.unflatten(0, following.shape).mean(1)

    def tokens(self, x):
        """Return a sequence of tokens for each sample."""
        return (torch.cat([x, x.cos()], dim=1) * 100).long() % 12


class Staged(Attending):
    """The same model with more blocks, in the order of their calls."""

    def __init__(self, case):
        super().__init__(case)
        self.blocks = nn.ModuleList(Attention() for _ in range(4))
        self.norm, self.head = self._modules.pop("norm"), self._modules.pop("head")  # after the blocks

    def test_step(self, batch, batch_idx):
        errors = self.errors(*batch[:2])  # runs the blocks only once
        self.log_dict({"test_error": errors.sqrt().mean(), "test_mean": errors.mean()})


class Sequenced(Attending):
    """The same model for sequences from the batch, with their targets."""

    def forward(self, x):
        x = self.embed(x) + self.positions[self.trainer.strategy.positions(x.shape[1])]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def errors(self, x, y):
        return nn.functional.cross_entropy(self(x).flatten(0, 1), y.flatten(), reduction="none").view(y.shape)


class StagedSequences(Staged, Sequenced):
    """The model with more blocks, for sequences from the batch."""


class Mixing(Attention):
    """A block of attention, with experts after it; it adds up what balances them."""

    def __init__(self):
        super().__init__()
        del self.up, self.down
        self.experts = Experts(8, 6, 4, shared_hidden=4, returns_balance=True)

    def forward(self, x, balance):
        packed = self.qkv(self.norm(x))
        q, k, v = (part.unflatten(-1, (-1, 2)).transpose(1, 2) for part in packed.chunk(3, dim=-1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        output, own = self.experts(self.second_norm(x))
        return x + output, balance + own


class Mixed(Sequenced):
    """The model for sequences from the batch, with experts in its blocks, and an auxiliary loss."""

    def __init__(self, case):
        super().__init__(case)
        self.blocks = nn.ModuleList(Mixing() for _ in range(2))

    def forward(self, x):
        return self.head(self.norm(self.mixed(x)[0]))

    def mixed(self, x):
        x = self.embed(x) + self.positions[self.trainer.strategy.positions(x.shape[1])]
        balance = torch.zeros_like(x[..., 0])
        for block in self.blocks:
            x, balance = block(x, balance)
        return x, balance

    def errors(self, x, y):
        x, balance = self.mixed(x)
        logits = self.head(self.norm(x))
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        return losses.view(y.shape) + 0.05 * balance


class StagedMixed(Mixed, StagedSequences):
    """The model with more blocks, which have experts."""

    def __init__(self, case):
        super().__init__(case)
        self.blocks = nn.ModuleList(Mixing() for _ in range(4))
        self.norm, self.head = self._modules.pop("norm"), self._modules.pop("head")


class Tabled(Net):
    """A small regression on rows of an embedding that may be remote; one of its rows is never trained."""

    def __init__(self, case):
        super().__init__(case)
        self.table = RemoteEmbedding(11, 4, padding_idx=3)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return self.net(self.table((x * 100).long() % 11).mean(1))

    def errors(self, x, y):
        return (self(x) - y).square().squeeze(1)


NETWORKS = {
    "dense": Dense,
    "attention": Attending,
    "sequences": Sequenced,
    "tables": Tabled,
    "stages": Staged,
    "stages of sequences": StagedSequences,
    "experts for sequences": Mixed,
    "stages of experts for sequences": StagedMixed,
}


def samples(number, seed, network="dense"):
    """Return samples, each with its index."""
    generator = torch.Generator().manual_seed(seed)
    if "sequences" in network:
        tokens = torch.randint(12, (number, 9), generator=generator)
        return TensorDataset(tokens[:, :-1], tokens[:, 1:], torch.arange(number))
    x = torch.randn(number, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.sin(x.sum(dim=1, keepdim=True)), torch.arange(number))


def batch_size_of(case, line):
    """Return the batch size of the loader."""
    return case.cut or GLOBAL_BATCH * line.sharing // line.processes // (case.accumulate * line.pieces)


def cutting_of(case, line):
    """Return the settings that make up a global batch from its batches."""
    if case.cut is None:
        return {"accumulate_grad_batches": case.accumulate * line.pieces}
    return {"global_batch_size": GLOBAL_BATCH}


def loss_of(errors, index):
    """Return the loss of samples, or of their tokens, with different numbers of units."""
    units = (index % 5 * (index > 3)).to(errors.dtype).view(-1, *[1] * (errors.ndim - 1)).expand_as(errors)
    return Loss((errors * units).sum(), units.sum())


def train(case, line, **where):
    """Train a case, evaluate, and return the results; `where` selects the devices, by default CPUs."""
    seed_everything(5, verbose=False)
    module = NETWORKS[line.network](case)
    batch_size, cutting = batch_size_of(case, line), cutting_of(case, line)
    trainer = Trainer(
        strategy=line.build(),
        precision=case.precision,
        max_epochs=case.epochs,
        # the metrics compared are the last epoch's
        check_val_every_n_epoch=1 if line.processes < 4 else case.epochs,
        gradient_clip_val=case.clip,
        log_every_n_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[ExpertBalance()] if "experts" in line.network else [],
        **cutting,
        **{"accelerator": "cpu", **where},
    )
    as_precise = {"dtype": torch.float32 if case.precision == "32-true" else torch.float64}
    number = case.samples - case.fewer
    trained, validated, tested = (
        TensorDataset(*(part.to(**as_precise) if part.is_floating_point() else part for part in data.tensors))
        for data in (samples(*size, line.network) for size in ((number, 1), (11, 2), (7, 3)))
    )
    trainer.fit(module, DataLoader(trained, batch_size, shuffle=True), DataLoader(validated, 4))
    callback_metrics, metrics = plain(trainer.callback_metrics), plain(trainer.logged_metrics)
    counts = trainer.global_step, trainer.samples_seen
    state = {name: value.clone() for name, value in whole_state(trainer, module).items()}
    # a short case has the metrics of fit's validation, which are the same except that experts are balanced by batch
    if case.epochs > 1 or "experts" in line.network:
        metrics |= trainer.validate(module, DataLoader(validated, 5), verbose=False)[0]
    metrics |= trainer.test(module, DataLoader(tested, 3), verbose=False)[0]
    return End(state, metrics, callback_metrics, *counts)


def whole_state(trainer, module):
    """Return the whole state of a module on every rank, wherever its parameters are."""
    if trainer.strategy.ranks.stage.world_size == 1:
        return gather_whole(module.state_dict(), is_kept=True)
    return trainer.strategy.ranks.all.broadcast(trainer.strategy.full_model_state())


def plain(values):
    """Return tensors as numbers."""
    return {name: value.item() for name, value in values.items()}


def train_all(line, cases):
    """Train some cases of the line, in one of its processes; return the results of each."""
    where = {"devices": line.devices if line.processes == 1 else "auto"}
    return {case: (train_in_own_loop if case.by_engine else train)(case, line, **where) for case in cases}


def train_in_own_loop(case, line, **where):
    """Train a case like `train`, in a custom loop with an `Engine`; return the weights."""
    seed_everything(5, verbose=False)
    engine = Engine(strategy=line.build(), precision=case.precision, **{"accelerator": "cpu", **where})
    net = Dense(case)
    data = DataLoader(samples(case.samples - case.fewer, 1), batch_size_of(case, line), shuffle=True)
    loader = engine.setup_dataloaders(data, **cutting_of(case, line))
    net, optimizer = engine.setup(net, net.configure_optimizers())
    for _epoch in range(case.epochs):
        for x, y, index in loader:
            errors = net.errors(x, y)
            engine.backward(loss_of(errors, index) if case.units else errors.mean())
            if engine.sync_gradients:
                if case.clip is not None:
                    engine.clip_gradients(optimizer, max_norm=case.clip)
                optimizer.step()
                optimizer.zero_grad()
    return {name: value.clone() for name, value in gather_whole(net.state_dict(), is_kept=True).items()}


def run(line, cases):
    """Return the results of some cases of the line on each rank."""
    if line.processes == 1:
        return by_case([train_all(line, cases)])
    if line.nodes == 1:
        return by_case(run_ranks(train_all, line.processes, line, cases, timeout=640))
    with two_nodes() as nodes:
        return by_case(run_ranks(train_on_node, line.processes, line, cases, nodes, timeout=640))


def run_together(jobs):
    """Return what `run` does for each line and its cases, by title, or the text of an error; its processes start once.

    All lines have as many processes.
    """
    (line, _), *others = jobs
    if line.processes == 1 or line.nodes > 1:
        assert not others, f"{line.title} starts alone"
        return {line.title: run(*jobs[0])}
    ranks = run_ranks(train_each, line.processes, jobs, timeout=640)
    found = {}
    for title in ranks[0]:
        ends = [rank[title] for rank in ranks]
        found[title] = next((end for end in ends if isinstance(end, str)), None) or by_case(ends)
    return found


def train_each(jobs):
    """Train the cases of each line, in one of their processes; return the results by title."""
    return {line.title: attempt(train_all, line, cases) for line, cases in jobs}


def train_on_node(line, cases, nodes):
    """Train some cases of the line, in a process that moves to its node, as a new one would have to import torch."""
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
    return train_all(line, cases)


def by_case(ranks):
    """Return the ranks' results by case."""
    return {case: [rank[case] for rank in ranks] for case in ranks[0]}


def compare(end, expected):
    """Return the differences between the results of two runs."""
    return Difference(
        largest(end.state, expected.state),
        largest(end.metrics, expected.metrics),
        largest(end.callback_metrics, expected.callback_metrics),
        abs(end.global_step - expected.global_step) + abs(end.samples_seen - expected.samples_seen),
    )


def largest(found, expected):
    """Return the largest difference between values with the same name; infinity if the names differ."""
    if found.keys() != expected.keys():
        return math.inf
    return max(torch.as_tensor(found[name] - value).abs().max().item() for name, value in expected.items())
