"""Ranks that use different parameters in a step (heads, experts, early exits) train as one process does."""

import copy
from datetime import timedelta

import pytest
import torch
from as_rank import double_trainer, run_all
from residual import Block
from sweep import IS_SWEEP
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import DDPOptions, DDPStrategy, FSDPStrategy, ParallelStrategy, TrainModule, ZeroStrategy
from echelon.common.errors import ModuleError
from echelon.testing import run_ranks

BATCH, ROWS = 2, 12
CHOICES = {
    "apart": [0, 0, 1, 1] * 3,
    "alike first": [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1],
    "all": [1] * 12,
    "some": [0, 0, 1, 1, 2, 2, 2, 2, 1, 0, 0, 0, 0, 1],
}
"""Which path each row takes."""


class Net(TrainModule):
    """Takes a path for each row, from a list."""

    def __init__(self, choices):
        super().__init__()
        torch.manual_seed(3)
        self.choices = choices
        self.embed, self.head = nn.Linear(1, 4), nn.Linear(4, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.build()

    def build(self):
        pass

    def path(self, x, choice):
        return self.head(self.blocks[choice](x))

    def loss(self, batch):
        rows = []
        for x in batch[0].split(1):
            y = self.path(self.embed(x / 10), self.choices[int(x) - 1])
            rows.append((y - x / 10).square().mean())
        return torch.stack(rows).mean()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


class Experts(Net):
    """Calls one of several blocks, each a unit of its own."""


class Heads(Net):
    """Calls one of several heads of different sizes, which are parts of one unit."""

    def build(self):
        self.heads = nn.ModuleDict(
            {f"task{n}": nn.Sequential(nn.Linear(4, n + 1), nn.Linear(n + 1, 1)) for n in (0, 1, 2)}
        )

    def path(self, x, choice):
        return self.heads[f"task{choice}"](self.blocks[2](self.blocks[0](x)))


class EqualHeads(Heads):
    """Calls one of several heads of one size."""

    def build(self):
        self.heads = nn.ModuleDict({f"task{n}": nn.Linear(4, 1) for n in (0, 1, 2)})


class Chooser(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ParameterList(nn.Parameter(torch.randn(4, 1)) for _ in range(3))

    def forward(self, x, choice):
        return x @ self.heads[choice]


class HeadsBehindBlocks(Net):
    """Calls all blocks in their order, and uses one of several parameters."""

    def build(self):
        self.chooser = Chooser()

    def path(self, x, choice):
        for block in self.blocks:
            x = block(x)
        return self.chooser(x, choice)

    def training_step(self, batch, batch_idx):
        y = self.embed(batch[0] / 10)
        for block in self.blocks:
            y = block(y)
        rows = [self.chooser(row, self.choices[int(x) - 1]) for row, x in zip(y.split(1), batch[0], strict=True)]
        return (torch.cat(rows) - batch[0] / 10).square().mean()

    validation_step = None


class Exits(Net):
    """Leaves early, or calls blocks in another order, or twice."""

    def path(self, x, choice):
        for index in ((0,), (0, 1, 2), (1, 0, 0, 2))[choice]:
            x = self.blocks[index](x)
        return self.head(x)


class Adapters(Net):
    """Adds an adapter inside of each block, with a part frozen."""

    def build(self):
        for block in self.blocks:
            block.low = nn.ParameterList(nn.Parameter(torch.randn(4, 4) / 4) for _ in range(3))
            block.up.weight.requires_grad_(False)

    def path(self, x, choice):
        for block in self.blocks:
            block.forward = lambda x, block=block: Block.forward(block, x) @ block.low[choice]
            x = block(x)
        return self.head(x)


class LeavesOut(Net):
    """Leaves a block out on one rank after some steps, or in some steps on both."""

    leaves_out = (False, False, True)

    def path(self, x, choice):
        for index, block in enumerate(self.blocks):
            if index != 1 or not choice or not self.leaves_out[self.global_step % 3]:
                x = block(x)
        return self.head(x)


class Gathers(Experts):
    """Gathers a mean over all ranks in each step."""

    def path(self, x, choice):
        self.all_gather(x.detach().mean())
        y = super().path(x, choice)
        self.all_gather(y.detach().mean())
        return y


class ByHand(Experts):
    """Makes its own steps."""

    def __init__(self, choices):
        super().__init__(choices)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.5)
        optimizer.step()


def case(kind, choices="apart", strategy=None, **settings):
    return kind, CHOICES[choices], {"strategy": strategy or FSDPStrategy(), **settings}


CASES = {
    "all with ddp": case(LeavesOut, "all", DDPStrategy(find_unused_parameters=True)),
    "experts with ddp": case(Experts, "alike first", DDPStrategy(find_unused_parameters=True)),
    "experts with zero": case(Experts, "some", ZeroStrategy(ddp=DDPOptions(find_unused_parameters=True))),
    "experts": case(Experts),
    "experts, alike at first": case(Experts, "alike first"),
    "experts, three": case(Experts, "some", gradient_clip_val=0.1),
    "experts, kept": case(Experts, "some", FSDPStrategy(reshard_after_forward=False)),
    "experts, fetched ahead": case(Experts, "some", FSDPStrategy(forward_prefetch=1, backward_prefetch=1)),
    "experts, accumulated": case(Experts, "some", global_batch_size=8),
    "experts, reduced each time": case(Experts, "some", FSDPStrategy(sync_each_micro_batch=True), global_batch_size=8),
    "experts, without samples": case(Experts, "some", rows=13),
    "experts, fetched ahead, without samples": case(
        Experts, "some", FSDPStrategy(timeout=timedelta(seconds=60), forward_prefetch=1, backward_prefetch=1), rows=5
    ),
    "heads": case(Heads, "some"),
    "equal heads": case(EqualHeads),
    "equal heads, alike at first": case(EqualHeads, "alike first"),
    "heads, accumulated": case(Heads, "some", global_batch_size=8),
    "exits": case(Exits, "some"),
    "exits, recomputed": case(Exits, "some", activation_checkpointing="full"),
    "leaves out, agreed": case(LeavesOut, "apart", FSDPStrategy(find_unused_parameters=True)),
    "leaves out together": case(LeavesOut, "all"),
    "adapters": case(Adapters, "some"),
    "gathers": case(Gathers, "some"),
    "by hand": case(ByHand, "some"),
}
ON_THREE = {
    "experts, one without samples": case(Experts, "some", rows=14, global_batch_size=6, max_epochs=2),
    "heads, one without samples": case(Heads, "some", rows=14, global_batch_size=6, max_epochs=2),
    "gathers, one without samples": case(Gathers, "some", rows=14, global_batch_size=6, max_epochs=2),
}
CUT = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
ON_FOUR = {
    "experts in replicas": case(Experts, "some", FSDPStrategy(replicate=2), global_batch_size=8),
    "heads in replicas": case(Heads, "some", FSDPStrategy(replicate=2), global_batch_size=8),
    "experts, cut": case(Experts, "some", ParallelStrategy(tp=2, tp_plan=CUT)),
    "heads in stages": case(HeadsBehindBlocks, "some", ParallelStrategy(pp=2, schedule="gpipe"), global_batch_size=8),
}
IN_A_SWEEP = (
    "experts with zero",
    "experts",
    "experts, fetched ahead",
    "experts, without samples",
    "equal heads, alike at first",
    "heads, accumulated",
    "exits",
    "gathers, one without samples",
    "heads in replicas",
)
"""Cases whose parts others have."""
ALL = {
    number: {name: case for name, case in cases.items() if IS_SWEEP or name not in IN_A_SWEEP}
    for number, cases in {2: CASES, 3: ON_THREE, 4: ON_FOUR}.items()
}


def train(kind, choices, settings, batch=BATCH):
    """Train, and validate; return the weights and the loss."""
    settings = dict(settings)
    rows = torch.arange(1.0, settings.pop("rows", ROWS) + 1, dtype=torch.float64)[:, None]
    data = DataLoader(TensorDataset(rows), batch)
    module = kind(choices)
    if module.automatic_optimization:
        settings = {"global_batch_size": 4, **settings}
    trainer = double_trainer(num_sanity_val_steps=0, **{"max_epochs": 1, **settings})
    trainer.fit(module, data, None if module.validation_step is None else copy.copy(data))
    return trainer.strategy.full_model_state(), trainer.callback_metrics.get("loss", torch.zeros(())).item()


@pytest.fixture(scope="module")
def found():
    return {number: run_ranks(run_all, number, train, cases) for number, cases in ALL.items()}


@pytest.mark.sweep
@pytest.mark.parametrize(("number", "name"), [(number, name) for number, cases in ALL.items() for name in cases])
def test_ranks_that_use_different_parameters_train_as_one_process(found, number, name):
    kind, choices, settings = ALL[number][name]
    settings = {key: value for key, value in settings.items() if key != "strategy"}
    # steps by hand have a batch of each rank
    weights, loss = train(kind, choices, settings, batch=number * BATCH if kind is ByHand else BATCH)
    for rank in found[number]:
        assert rank[name][1] == pytest.approx(loss, rel=0, abs=1e-12)
    for weight, value in weights.items():
        torch.testing.assert_close(found[number][0][name][0][weight], value, rtol=0, atol=1e-12)


def test_a_rank_that_leaves_the_order_of_all_earlier_steps_alone_is_named():
    strategy = FSDPStrategy(timeout=timedelta(seconds=8))
    text = (
        r"training_step gathers blocks.2.up.weight, .* on data rank 1, where it gathers blocks.1.up.weight, .* in "
        r"earlier runs, and still does on data ranks \[0\].*find_unused_parameters=True"
    )
    with pytest.raises(ModuleError, match=text):
        run_ranks(train, 2, *case(LeavesOut, strategy=strategy))


def test_ddp_names_parameters_that_a_later_step_leaves_out():
    text = r"4 parameter\(s\) got no gradient .*: blocks.1.up.weight, .* or set find_unused_parameters=True"
    with pytest.raises(ModuleError, match=text):
        run_ranks(train, 2, *case(LeavesOut, strategy=DDPStrategy()))
