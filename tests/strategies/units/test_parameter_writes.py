"""What a step writes into parameters is what one process writes, on any number of ranks, or an error that names it."""

import copy
import re

import pytest
import torch
from as_rank import calm_down, double_trainer, world_size
from sweep import dealt
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from echelon import ActivationCheckpointing, TrainModule, seed_everything
from echelon.common.errors import ModuleError
from echelon.strategies.fsdp import FSDPStrategy
from echelon.strategies.model_parallel import ParallelStrategy
from echelon.testing import run_ranks

WIDTH = 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Writes(TrainModule):
    """A net; what its steps write is a subclass's."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)
        self.memory = nn.Parameter(torch.linspace(0, 1, 7), requires_grad=False)

    def total(self, value):
        """Return the sum over the samples of all ranks."""
        return self.trainer.strategy.all_reduce(value.detach())

    def features(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, batch):
        x = self.features(batch[0])
        self.write(x)
        return (self.head(x) + self.memory.sum()).square().mean()

    def write(self, x):
        raise NotImplementedError

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02)


class Memory(Writes):
    """Writes through ``.data``."""

    def write(self, x):
        self.memory.data += 0.01 * self.total(x.sum())


class OnlyTheFirst(Writes):
    """Writes a value that is in the shard of one rank."""

    def write(self, x):
        self.memory.data[0] = self.total(x.sum())


class Assigned(Writes):
    def write(self, x):
        self.memory.data = self.memory.data * 0.5 + 0.1


class Queue(Writes):
    """A queue of the features of all ranks, as in MoCo; as large as a batch."""

    def __init__(self):
        super().__init__()
        self.queue = nn.Parameter(torch.zeros(24, WIDTH), requires_grad=False)
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def write(self, x):
        mean = self.total(x.sum(0))[None]
        self.queue[self.place : self.place + 1] = mean
        self.memory += self.queue.mean()
        self.place += 1


class Codebook(nn.Module):
    """The exponential averages of a VQ layer; a unit of its own."""

    def __init__(self, total):
        super().__init__()
        self.total = [total]
        self.codes = nn.Parameter(torch.randn(11, WIDTH), requires_grad=False)
        self.counts = nn.Parameter(torch.ones(11), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        nearest = torch.cdist(x.detach(), self.codes).argmin(-1)
        chosen = nn.functional.one_hot(nearest, 11).to(x.dtype)
        with torch.no_grad():
            counts, sums = self.total[0](chosen.sum(0)), self.total[0](chosen.T @ x)
            torch._foreach_mul_([self.counts, self.codes], 0.9)
            self.counts.add_(0.1 * counts)
            self.codes.add_(0.1 * sums / self.counts[:, None])
        return (x + (self.codes[nearest] - x).detach()) * self.scale


class Quantized(Writes):
    def __init__(self):
        super().__init__()
        self.quantize = Codebook(self.total)

    def features(self, x):
        return self.quantize(super().features(x))

    def write(self, x):
        pass


class Teacher(Writes):
    """A momentum teacher, whose update reads the student."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.blocks).requires_grad_(False)

    def write(self, x):
        pass

    def loss(self, batch):
        for student, teacher in zip(self.blocks[0].parameters(), self.teacher[0].parameters(), strict=True):
            teacher.data.mul_(0.9).add_(student.data, alpha=0.1)
        x = self.blocks[0](batch[0])
        return (self.head(x) - self.teacher[0](batch[0])).square().mean() + self.memory.sum()


class TeacherOfOwnWeights(Writes):
    """A teacher in the root, with a student there."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Parameter(torch.zeros(1, WIDTH), requires_grad=False)

    def write(self, x):
        self.teacher.copy_(0.9 * self.teacher + 0.1 * self.head.weight.detach())
        self.memory.data += x.new_tensor(1.0)


class Clamped(Writes):
    """Changes a trained parameter before it is used."""

    def loss(self, batch):
        with torch.no_grad():
            self.head.weight.clamp_(-0.2, 0.2)
        self.head.bias.data.clamp_(0, 0.05)
        return self.head(self.features(batch[0])).square().mean()


class LimitedBlock(Block):
    def forward(self, x):
        with torch.no_grad():
            self.up.weight.clamp_(-0.3, 0.3)
        self.down.bias.data.mul_(0.9)
        self.down.weight.data.clamp_(-0.3, 0.3)
        return super().forward(x)


class Limited(Writes):
    """A unit changes its own weights, which tensor parallelism cuts."""

    def __init__(self):
        super().__init__()
        self.blocks[1] = LimitedBlock()

    def write(self, x):
        pass


class Cut(Writes):
    """Changes weights that tensor parallelism cuts."""

    def __init__(self):
        super().__init__()
        self.single = Block()

    def write(self, x):
        with torch.no_grad():
            self.single.up.weight.clamp_(-0.3, 0.3)
        self.single.down.weight.data.clamp_(-0.3, 0.3)
        self.single.down.bias.data.mul_(0.9)
        self.single(x)


class Counter(nn.Module):
    """A unit that writes, whatever the samples are."""

    def __init__(self):
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(3, 2), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        self.counts.data.mul_(0.9)
        with torch.no_grad():
            self.counts[2] += 1
        return x * self.scale


class Counts(Writes):
    """Writes in every micro-batch, and computes the same."""

    def __init__(self):
        super().__init__()
        self.blocks.append(Counter())

    def loss(self, batch):
        self.memory.data.mul_(0.9).add_(1)
        return self.head(self.features(batch[0])).square().mean()


class Late(Writes):
    """Writes every third time only."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def write(self, x):
        self.calls += 1
        if self.calls % 3 == 0:
            self.memory.data.mul_(0.5).add_(self.total(x.sum()))


class BeforeZeroGrad(Writes):
    def write(self, x):
        pass

    def on_before_zero_grad(self, optimizer):
        self.memory.data.mul_(0.5).add_(1)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.memory.data.mul_(0.9)


class Manual(Quantized):
    automatic_optimization = False

    def __init__(self):
        super().__init__()
        del self.memory

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.head(self.features(batch[0])).square().mean())
            optimizer.step()

    def validation_step(self, batch, batch_idx):
        self.log("val", self.head(self.features(batch[0])).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


KINDS = (
    Memory,
    OnlyTheFirst,
    Assigned,
    Queue,
    Quantized,
    Teacher,
    TeacherOfOwnWeights,
    Clamped,
    Late,
    BeforeZeroGrad,
    Manual,
)


def is_unit(name, module):
    return isinstance(module, Block | Codebook | Counter)


def data(seed):
    return TensorDataset(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed)).double())


def fit(kind, *, data_size=None, validates=True, **settings):
    seed_everything(3, verbose=False)
    module = kind()
    trainer = double_trainer(**{"max_epochs": 2, "num_sanity_val_steps": 0, **settings})
    size = 4 // (data_size or world_size())
    trainer.fit(module, DataLoader(data(1), size), DataLoader(data(2), size) if validates else None)
    return {name: whole(value).clone() for name, value in module.state_dict().items()}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


STRATEGIES = {
    "fsdp": lambda: FSDPStrategy(policy=is_unit),
    "whole": lambda: FSDPStrategy(reshard_after_forward=False),
    "offloaded": lambda: FSDPStrategy(cpu_offload=True, policy=is_unit),
}
CASES = [("fsdp", kind) for kind in KINDS]
CASES += [case for case in dealt(["whole", "offloaded"], KINDS, (0, 4, 8)) if case not in CASES]
"""Each kind is tested on shards, and some in one of the two other ways; in a sweep all in both."""


def train_each():
    calm_down()
    return {(name, kind.__name__): fit(kind, strategy=STRATEGIES[name]()) for name, kind in CASES}


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(train_each, 2)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_step_writes_is_what_one_process_writes(ranks, kind):
    expected = fit(kind)
    for rank in ranks:
        for name in [name for name, other in CASES if other is kind]:
            torch.testing.assert_close(rank[name, kind.__name__], expected, rtol=0, atol=1e-12)


# --- with other settings ---------------------------------------------------------------------------------------------


class BuiltLate(Memory):
    """Allocates its parameters when they are sharded."""

    def __init__(self):
        TrainModule.__init__(self)

    def configure_model(self):
        if not hasattr(self, "memory"):
            self.blocks = nn.ModuleList(Block() for _ in range(3))
            self.head, self.memory = nn.Linear(WIDTH, 1), nn.Parameter(torch.linspace(0, 1, 7), requires_grad=False)


def is_computed_again(name, module):
    return isinstance(module, Block | Codebook | Counter)


SETTINGS = {
    "accumulated": (Counts, {}, {"accumulate_grad_batches": 2}),
    "accumulated, reduced each time": (Counts, {"sync_each_micro_batch": True}, {"accumulate_grad_batches": 2}),
    "computed again": (Quantized, {}, {"activation_checkpointing": ActivationCheckpointing(modules=is_computed_again)}),
    "built late": (BuiltLate, {"deferred_init": True}, {}),
    "clipped": (Queue, {}, {"gradient_clip_val": 0.1}),
}


def train_with_settings():
    calm_down()
    return {
        name: fit(kind, strategy=FSDPStrategy(policy=is_unit, **options), **settings)
        for name, (kind, options, settings) in SETTINGS.items()
    }


@pytest.mark.only_in_sweep
def test_settings_keep_what_is_written():
    expected = {name: fit(kind, **settings) for name, (kind, _, settings) in SETTINGS.items()}
    for rank in run_ranks(train_with_settings, 2):
        for name in SETTINGS:
            torch.testing.assert_close(
                rank[name], expected[name], rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
            )


class CutCodebook(Quantized, Cut):
    def write(self, x):
        self.memory.data += self.total(x.sum())
        Cut.write(self, x)


PLAN = {"single.up": "colwise", "single.down": "rowwise"}


def train_on_meshes():
    calm_down()
    layouts = {
        "replicas": (FSDPStrategy(replicate=2), 4),
        "tensor parallel": (ParallelStrategy(dp_shard=2, tp=2, tp_plan=PLAN), 2),
    }
    return {
        (name, kind.__name__): fit(kind, strategy=strategy, data_size=size, max_epochs=1)
        for name, (strategy, size) in layouts.items()
        for kind in (Cut, CutCodebook)
    }


@pytest.mark.only_in_sweep
def test_replicas_and_tensor_parallel_ranks_keep_what_is_written():
    expected = {kind.__name__: fit(kind, max_epochs=1) for kind in (Cut, CutCodebook)}
    for rank in run_ranks(train_on_meshes, 4):
        for (_, kind), weights in rank.items():
            torch.testing.assert_close(weights, expected[kind], rtol=0, atol=1e-12)


# --- writes that differ ----------------------------------------------------------------------------------------------


class OwnSamples(Memory):
    def total(self, value):
        return value.detach()


class OwnQueue(Queue):
    def total(self, value):
        return value.detach()


class OnOneRank(Memory):
    def write(self, x):
        if self.trainer.global_rank == 1:
            self.memory.data.fill_(2.0)


class DiffersLate(Memory):
    """Writes the same at first."""

    def write(self, x):
        late = self.trainer.global_step >= 3  # not in the validation before
        self.memory.data += x.detach().sum() if late else 1.0


class OnlyInValidation(OwnSamples):
    def training_step(self, batch, batch_idx):
        return self.head(self.features(batch[0])).square().mean()


class OwnStatistics(Manual):
    def total(self, value):
        return value.detach()


MISTAKES = {
    OwnSamples: "training_step changed the parameter memory to other values on rank 0 than on rank 1",
    OwnQueue: "training_step changed the parameter (memory|queue) to other values on rank 0 than on rank 1",
    OnOneRank: "training_step changed the parameter memory on rank 1, but not on rank 0",
    DiffersLate: "training_step changed the parameter memory to other values",
    OnlyInValidation: "validation_step changed the parameter memory to other values",
    OwnStatistics: "training_step changed the parameter quantize.(codes|counts) to other values",
}


def make_mistakes():
    calm_down()
    found = {}
    for kind in MISTAKES:
        with pytest.raises(ModuleError) as caught:
            fit(kind, strategy=FSDPStrategy(policy=is_unit))
        found[kind] = str(caught.value)
    with pytest.raises(ModuleError) as caught:
        fit(Memory, strategy=FSDPStrategy(), precision="bf16-mixed")
    return found, str(caught.value)


def test_ranks_that_write_other_values_get_an_error_that_names_the_parameter():
    for found, of_copy in run_ranks(make_mistakes, 2):
        for kind, message in MISTAKES.items():
            assert re.search(message, found[kind])
            assert "register_buffer" in found[kind] and "on_train_batch_end" in found[kind]
        assert "training_step changed the parameter memory, which it sees as a copy in torch.bfloat16" in of_copy
