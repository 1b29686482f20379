"""A rank without samples follows what the others' step sends, in whatever order, or runs the step and undoes it."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from as_rank import double_trainer, run_all, world_size
from residual import Block
from sweep import IS_SWEEP
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric

from echelon import FSDPStrategy, ParallelStrategy, TrainModule
from echelon.common.errors import ModuleError
from echelon.testing import run_ranks

BATCH, SAMPLES = 2, 5
OUTSIDE = []


class Net(TrainModule):
    """Counts its samples in a metric, a list, a module-level list and a hook; `step` is how blocks are called."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.head = nn.Linear(1, 4), nn.Linear(4, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.metric, self.values, self.calls = SumMetric(), [], [0.0]
        self.embed.register_forward_hook(lambda *_: self.calls.append(1.0))
        self.draws = torch.Generator().manual_seed(1)

    def features(self, x, at):
        x = self.embed(x / 10)
        for block in self.blocks:
            x = block(x)
        return x

    def count(self, x):
        self.metric.update(x)
        self.values.extend(x.flatten().tolist())
        OUTSIDE.extend(x.flatten().tolist())
        torch.rand(1, generator=self.draws, dtype=torch.float64)

    def loss(self, batch, at):
        (x,) = batch
        self.count(x)
        return (self.head(self.features(x, at)) - x).square().mean()

    def training_step(self, batch, batch_idx):
        return self.loss(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.loss(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Reordered(Net):
    """Calls its blocks in another order in each step, and some twice."""

    def features(self, x, at):
        x = self.embed(x / 10)
        for index in ((0, 1, 2), (2, 0, 1, 2), (1, 1, 0, 2))[self.global_step % 3]:
            x = self.blocks[index](x)
        return x


class Partial(Net):
    """Leaves a block out, which gets no gradient."""

    def features(self, x, at):
        return self.blocks[2](self.blocks[0](self.embed(x / 10)))


class Unused(Net):
    """Computes features whose gradient nothing asks for before those of its loss: torch gathers for it ahead."""

    def features(self, x, at):
        first = self.embed(x / 10)
        for _ in range(2):
            self.unused, x = x, first
            for block in self.blocks:
                x = block(x)
        return x


class SendsByItself(Net):
    """Gathers a feature from all ranks, by this package and by torch."""

    def features(self, x, at):
        x = super().features(x, at)
        self.all_gather(x.detach().mean())
        if world_size() > 1:
            dist.all_reduce(x.detach().sum())
        return self.blocks[0](x)


class Remembers(Net):
    """Writes the number of the step into a frozen parameter, and computes with it."""

    def __init__(self):
        super().__init__()
        self.memory = nn.Parameter(torch.zeros(5), requires_grad=False)

    def features(self, x, at):
        self.memory.data.fill_(self.global_step + 1.0)
        return super().features(x, at) * (1 + self.memory.mean() / 100)


class ByHand(Net):
    """Steps by itself, with a scheduler."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch, batch_idx))
        self.clip_gradients(optimizer, gradient_clip_val=1.0)
        optimizer.step()
        scheduler.step()

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)]


class SendsInBackward(Net):
    """Gathers a gradient from all ranks."""

    def features(self, x, at):
        x = super().features(x, at)
        if x.requires_grad and world_size() > 1:
            x.register_hook(lambda gradient: dist.all_reduce(gradient.sum()))
        return x


def whole(**options):
    return {"strategy": FSDPStrategy(**options)}


CASES = {
    "plain": (Net, SAMPLES, whole()),
    "one sample": (Net, 1, whole()),
    "two samples": (Net, 2, whole()),
    "another order in each step": (Reordered, SAMPLES, whole()),
    "a block without a gradient": (Partial, SAMPLES, whole()),
    "kept after forward": (Reordered, SAMPLES, whole(reshard_after_forward=False)),
    "fetched ahead": (Net, SAMPLES, whole(forward_prefetch=2, backward_prefetch=2)),
    "one unit": (Net, SAMPLES, whole(policy=lambda name, _: name == "blocks.1")),
    "recomputed": (Reordered, SAMPLES, whole() | {"activation_checkpointing": "full"}),
    "accumulated": (Reordered, 13, whole() | {"global_batch_size": 10}),
    "reduced each time": (Reordered, 13, whole(sync_each_micro_batch=True) | {"global_batch_size": 10}),
    "compiled": (Net, 3, whole() | {"compile": {"backend": "eager"}}),
    "sends by itself": (SendsByItself, SAMPLES, whole()),
    "sends by itself at once": (SendsByItself, 1, whole()),
    "sends by itself, with compared calls": (SendsByItself, SAMPLES, whole(check_collectives=True)),
    "writes a parameter": (Remembers, SAMPLES, whole()),
    "writes a parameter at once": (Remembers, 1, whole(reshard_after_forward=False)),
    "by hand": (ByHand, SAMPLES, whole()),
    "by hand at once": (ByHand, 1, whole()),
    "a forward without a backward": (Unused, 13, whole() | {"global_batch_size": 8}),
}
ON_FOUR = {
    "kept on two ranks": (Reordered, SAMPLES, whole(reshard_after_forward=2)),
    "replicas": (Reordered, SAMPLES, whole(replicate=2)),
    "replicas that send by themselves": (SendsByItself, 1, whole(replicate=2)),
    "replicas of one rank": (Net, SAMPLES, {"strategy": ParallelStrategy(dp_replicate=4, dp_shard=1)}),
}
IN_A_SWEEP = (
    ()
    if IS_SWEEP
    else (
        "two samples",
        "kept after forward",
        "sends by itself, with compared calls",
        "by hand at once",
        "replicas",
    )
)
"""Cases whose parts others have, the last in test_whole_parameters.py."""
CASES, ON_FOUR = ({name: case for name, case in cases.items() if name not in IN_A_SWEEP} for cases in (CASES, ON_FOUR))
ONLY_ON_THREE = ("sends by itself at once", "by hand")
ON_THREE = {
    name: case
    for place, (name, case) in enumerate(CASES.items())
    if IS_SWEEP or (place % 3 == 1 and name != "sends by itself") or name in ("plain", *ONLY_ON_THREE)
}
ON_TWO = {name: case for name, case in CASES.items() if IS_SWEEP or name not in ON_THREE or name == "plain"}
"""Each case is tested on two ranks or on three, the plain one on both."""
RUNS_STEPS = ("sends by itself", "sends by itself at once", "replicas that send by themselves")


def train(kind, number, settings, batch=BATCH):
    """Train and validate for two epochs; return the weights and what this rank has counted."""
    OUTSIDE.clear()
    data = DataLoader(TensorDataset(torch.arange(1.0, number + 1, dtype=torch.float64)[:, None]), batch)
    module = kind()
    if module.automatic_optimization:
        settings = {"global_batch_size": 4, **settings}
    trainer = double_trainer(max_epochs=2, num_sanity_val_steps=0, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, data, copy.copy(data))
    said = [str(warning.message) for warning in caught if "have no samples" in str(warning.message)]
    state = trainer.strategy.full_model_state()
    return {
        "weights": {name: value for name, value in state.items() if not name.startswith("metric")},
        "metric": module.metric.sum_value.item(),
        "values": sorted(module.values),
        "outside": sorted(OUTSIDE),
        "calls": len(module.calls) - 1,
        "loss": trainer.callback_metrics["loss"].item(),
        "draws": module.draws.get_state(),
        "said": said,
    }


@pytest.fixture(scope="module")
def found():
    return {
        2: run_ranks(run_all, 2, train, ON_TWO),
        3: run_ranks(run_all, 3, train, ON_THREE),
        4: run_ranks(run_all, 4, train, ON_FOUR),
    }


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("number", "name"), [(n, name) for n, cases in ((2, ON_TWO), (3, ON_THREE), (4, ON_FOUR)) for name in cases]
)
def test_all_ranks_together_do_what_one_process_does(found, number, name):
    kind, samples, settings = (CASES if number < 4 else ON_FOUR)[name]
    settings = {key: value for key, value in settings.items() if key not in ("strategy", "compile")}
    # steps by hand have a batch of each rank
    expected = train(kind, samples, settings, batch=number * BATCH if kind is ByHand else BATCH)
    ranks = [rank[name] for rank in found[number]]
    everything = sorted(4 * list(map(float, range(1, samples + 1))))  # two epochs, each with a validation
    assert sum(rank["metric"] for rank in ranks) == sum(everything)
    assert sorted(value for rank in ranks for value in rank["values"]) == everything
    assert sorted(value for rank in ranks for value in rank["outside"]) == everything
    for rank in ranks:
        draws = torch.Generator().manual_seed(1)
        for _ in range(rank["calls"]):
            torch.rand(1, generator=draws, dtype=torch.float64)
        assert torch.equal(rank["draws"], draws.get_state())
        assert rank["loss"] == pytest.approx(expected["loss"], rel=0, abs=1e-12)
    for weight, value in expected["weights"].items():
        torch.testing.assert_close(ranks[0]["weights"][weight], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("number", "name"), [(2, RUNS_STEPS[0]), (3, RUNS_STEPS[1]), (4, RUNS_STEPS[2])])
def test_one_warning_for_each_step_names_the_call_that_sends(found, number, name):
    said = [line for rank in found[number] for line in rank[name]["said"]]
    assert sorted(line.split(" calls ")[0] for line in said) == ["training_step", "validation_step"]
    for line in said:
        assert f"calls all_gather ({__file__}:" in line


@pytest.mark.parametrize(
    ("kind", "number", "strategy", "call"),
    [
        (SendsInBackward, 2, FSDPStrategy(), "all_reduce"),
        (SendsByItself, 4, ParallelStrategy(pp=2, schedule="gpipe"), "all_gather"),
    ],
    ids=["in backward", "in a pipeline"],
)
def test_what_idle_ranks_cannot_take_part_in_is_refused(kind, number, strategy, call):
    text = rf"training_step calls {call} .*, while data ranks \[1\] have no samples in this step.*drop_last=True"
    with pytest.raises(ModuleError, match=text):
        run_ranks(train, number, kind, 1, {"strategy": strategy})
