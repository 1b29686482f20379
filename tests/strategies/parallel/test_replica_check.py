"""What ranks hold in common stays equal, as one process has it, or an error names what does not, and since when."""

import re
import warnings

import pytest
import torch
from as_rank import calm_down, double_trainer, world_size
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Engine, ModelCheckpoint, TrainModule, seed_everything
from echelon.common.errors import ModuleError
from echelon.strategies import FSDPStrategy, ParallelStrategy
from echelon.strategies.state.digest import digest_of_all
from echelon.testing import run_ranks


class Memory(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.memory = nn.Parameter(torch.zeros(3), requires_grad=False)

    def training_step(self, batch, batch_idx):
        self.write(batch[0])
        return self.layer(batch[0]).square().mean()

    def write(self, x):
        self.memory.data += self.trainer.strategy.all_reduce(x.sum(0))

    def configure_optimizers(self):
        return torch.optim.SGD(self.layer.parameters(), lr=0.1)


class Counts(Memory):
    """Writes once for each micro-batch."""

    def write(self, x):
        self.memory.data += 1


class OwnSamples(Memory):
    def write(self, x):
        self.memory.data += x.sum(0)


class InAHookLater(Memory):
    def write(self, x):
        pass

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.global_step == 3:
            self.memory[0] = batch[0].sum()


class Manual(OwnSamples):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()


class Kept(Memory):
    """Does nothing wrong; NaN is equal to NaN, and an infinite value to itself."""

    def write(self, x):
        self.memory.data[:2] = torch.tensor([float("nan"), float("inf")])


class WrittenWeights(Kept):
    """Writes the data of a trained weight, which no version counter sees."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.layer.weight.data[0, 1] += self.trainer.strategy.rank * (self.trainer.global_step == 4)


class OwnScale(Kept):
    """Multiplies gradients, after they were averaged, by what only its rank knows."""

    def on_before_optimizer_step(self, optimizer):
        self.layer.bias.grad *= 1 + self.trainer.strategy.data_rank


class OwnRate(Kept):
    """Has a learning rate of its own on each rank."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.layer.parameters(), lr=0.1 * (1 + self.trainer.strategy.rank))


class OwnBuffer(Kept):
    """Counts its rank in a buffer before training; a cache of what its rank has computed is its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("cache", torch.zeros(0), persistent=False)

    def on_train_start(self):
        self.cache = torch.ones(1 + self.global_rank)
        self.fill()

    def fill(self):
        self.count[1] += self.global_rank


class Counter(OwnBuffer):
    """Writes its buffer in steps, as batch norms do: rank 0's is kept."""

    def fill(self):
        pass

    def write(self, x):
        self.count += x.sum()


class SavedLater(Kept):
    """Is changed between the end of an epoch and its checkpoint."""

    def on_save_checkpoint(self, checkpoint):
        with torch.no_grad():
            self.layer.bias += self.trainer.strategy.rank


def fit(kind, size=8, batch_size=2, **settings):
    seed_everything(3, verbose=False)
    module = kind()
    data = TensorDataset(torch.randn(size, 3, generator=torch.Generator().manual_seed(1)).double())
    trainer = double_trainer(**{"max_epochs": 1, **settings})
    trainer.fit(module, DataLoader(data, batch_size // world_size()))
    return {name: value.clone() for name, value in module.state_dict().items()}


def error_of(kind, **settings):
    with pytest.raises(ModuleError) as caught:
        fit(kind, **settings)
    return str(caught.value)


STRATEGIES = ("ddp", "zero")
FROZEN = (OwnSamples, InAHookLater, Manual)


def train_each(folder):
    calm_down()
    found = {}
    for strategy in STRATEGIES:
        found[strategy] = fit(Memory, strategy=strategy)
        fit(Kept, strategy=strategy)
        # three micro-batches of one sample in the last window, so one rank has two, and the other has one
        found[strategy, "fewer"] = fit(Counts, 7, strategy=strategy, accumulate_grad_batches=2)
        found[strategy, "none"] = fit(Counts, 5, strategy=strategy)
        for kind in (*FROZEN, WrittenWeights):
            found[strategy, kind] = error_of(kind, strategy=strategy)
    for strategy in (*STRATEGIES, "fsdp", "local_sgd"):
        found[strategy, OwnBuffer] = error_of(OwnBuffer, strategy=strategy)
        fit(Counter, strategy=strategy)
    found["scale"], found["rate"] = error_of(OwnScale), error_of(OwnRate)
    fit(OwnRate, strategy="zero")  # whoever keeps the state of a parameter updates it for all
    fit(OwnSamples, strategy="local_sgd")
    found["averaged"] = fit(OwnRate, strategy="local_sgd")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(OwnScale, check_replicas="warn", max_epochs=2)
    found["warned"] = [str(each.message) for each in caught if "Replicas differ" in str(each.message)]
    saver = ModelCheckpoint(dirpath=folder, every_n_train_steps=2, save_top_k=-1)
    found["saved"] = error_of(SavedLater, callbacks=saver, enable_checkpointing=True)
    found["loop"] = errors_of_a_loop(folder)
    return found


def errors_of_a_loop(folder):
    """Return the errors of a user's own loop: after its first step, and at a checkpoint."""
    found = []
    for step_of_error in (1, 3):
        with pytest.raises(ModuleError) as caught:
            own_loop(folder, step_of_error)
        found.append(str(caught.value))
    return found


def own_loop(folder, step_of_error):
    engine = Engine(strategy="ddp", accelerator="cpu", precision="64-true")
    seed_everything(3, verbose=False)
    model = nn.Linear(3, 1)
    model, optimizer = engine.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(1, 4):
        engine.backward(model(torch.ones(2, 3, dtype=torch.double)).mean())
        optimizer.step()
        optimizer.zero_grad()
        if step == step_of_error:
            model.weight.data[0, 2] += engine.global_rank
    engine.save(folder / "never", {"model": model})


def test_ranks_agree_or_get_an_error_that_names_the_parameter(tmp_path):
    expected = fit(Memory), fit(Counts, 7, accumulate_grad_batches=2), fit(Counts, 5)
    ranks = run_ranks(train_each, 2, tmp_path)
    for found in ranks:
        for strategy in STRATEGIES:
            torch.testing.assert_close(
                (found[strategy], found[strategy, "fewer"], found[strategy, "none"]), expected, rtol=0, atol=1e-12
            )
            for kind in FROZEN:
                assert re.search(r"the frozen parameter memory\[[012]\] is \S+ on rank 0 and", found[strategy, kind])
                assert "all_reduce" in found[strategy, kind] and "register_buffer" in found[strategy, kind]
            assert re.search(
                r"global_step 4: the parameter layer.weight\[0, 1\] is .*; at global_step 1 they were still equal",
                found[strategy, WrittenWeights],
            )
        for strategy in (*STRATEGIES, "fsdp", "local_sgd"):
            start = "Replicas differ after global_step 0: the buffer count[1] is 0.0 on rank 0 and 1.0 on rank 1."
            assert found[strategy, OwnBuffer].startswith(start)
        assert re.search(
            r"global_step 1: the parameter layer.bias\[0\] is -?\d+\.\d+ on rank 0 and -?\d+\.\d+ on rank 1; at "
            r"global_step 0 they were still equal.*check_replicas='warn'",
            found["scale"],
        )
        assert "the parameter layer.weight[0, 0] is" in found["rate"]
        assert re.search(r"after global_step 4: the parameter layer.bias\[0\]", found["saved"])
        assert [re.match(r"Replicas differ after global_step (\d): the parameter (\S+)", e).groups()
                for e in found["loop"]] == [("2", "weight[0,"), ("3", "weight[0,")]  # fmt: skip
    assert len(ranks[0]["warned"]) == 1 and not ranks[1]["warned"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.LayerNorm(4), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.up(self.norm(x)).relu())


class Blocks(TrainModule):
    """Layers that are split over ranks, with a norm that is repeated on all of them."""

    def __init__(self):
        super().__init__()
        self.block = Block()
        self.register_buffer("table", torch.zeros(3))

    def training_step(self, batch, batch_idx):
        return self.block(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_start(self):
        if self.changed == "table" and self.culprit == self.trainer.strategy.rank:
            self.table[2] = 1

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.changed != "table" and self.trainer.global_step == 2 and self.culprit == self.trainer.strategy.rank:
            parameter = self.block.get_parameter(self.changed)
            parameter.data.to_local()[..., -1] += 1


def fit_blocks(strategy, culprit=None, changed=None):
    seed_everything(3, verbose=False)
    module = Blocks()
    module.culprit, module.changed = culprit, changed
    data = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)).double())
    double_trainer(strategy=strategy, max_epochs=1).fit(module, DataLoader(data, 2))


def train_sharded():
    calm_down()
    plan = {"block.up": "colwise", "block.down": "rowwise"}
    layouts = {
        "fsdp": FSDPStrategy,
        "hsdp": lambda: FSDPStrategy(replicate=2),
        "tp": lambda: ParallelStrategy(tp=2, tp_plan=plan),
        "tp alone": lambda: ParallelStrategy(tp=2, dp_replicate=2, dp_shard=1, tp_plan=plan),
    }
    found = {}
    for name, make in layouts.items():
        if name in ("hsdp", "tp alone"):  # elsewhere, a change of what one rank alone has is no error either
            fit_blocks(make())
        for changed in ("up.weight", "norm.weight", "table"):
            try:
                fit_blocks(make(), 3, changed)
            except ModuleError as error:
                found[name, changed] = str(error)
    return found


@pytest.mark.slow
def test_shards_that_several_ranks_hold_are_compared():
    found, *others = run_ranks(train_sharded, 4)
    assert all(other == found for other in others)
    pairs = {
        key: re.search(r"(?:block|buffer)[. ](\S+)\[.* on (ranks? [\d, ]+) and \S+ on (rank \d)[;.]", e).groups()
        for key, e in found.items()
    }
    everywhere = ("fsdp", "hsdp", "tp", "tp alone")
    assert pairs == {
        ("hsdp", "up.weight"): ("up.weight", "rank 1", "rank 3"),
        ("hsdp", "norm.weight"): ("norm.weight", "rank 1", "rank 3"),
        ("tp", "norm.weight"): ("norm.weight", "rank 2", "rank 3"),
        ("tp alone", "up.weight"): ("up.weight", "rank 1", "rank 3"),
        ("tp alone", "norm.weight"): ("norm.weight", "ranks 0, 1, 2", "rank 3"),
        **{(layout, "table"): ("table", "ranks 0, 1, 2", "rank 3") for layout in everywhere},
    }


def test_a_digest_of_all_tells_values_and_places_apart():
    large, small = torch.ones(1 << 17), torch.zeros(3)
    tensors = [large, small, torch.tensor([True, False]), torch.tensor(2 + 1j), torch.empty(0)]
    before = digest_of_all(tensors)
    assert before == digest_of_all([tensor.clone() for tensor in tensors])
    changed = [
        [large.clone().index_fill_(0, torch.tensor(9), 2.0), *tensors[1:]],
        [large, torch.tensor([0.0, 0.0, -0.0]), *tensors[2:]],
        [-large, *tensors[1:]],
        [large, *tensors[1:3], tensors[3].conj().resolve_conj(), tensors[4]],
        [*tensors[:2], torch.tensor([False, True]), *tensors[3:]],
        [*tensors[:3], torch.tensor(1 + 2j), tensors[4]],
    ]
    assert len({int(before), *(int(digest_of_all(each)) for each in changed)}) == 7
