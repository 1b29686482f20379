"""Checks that run a step twice leave no trace: what a module counts by itself is what it counts in one process."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import chain

import pytest
import torch
from as_rank import calm_down, double_trainer, world_size
from once import once
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import ParallelStrategy, TrainModule, seed_everything
from echelon.testing import run_ranks

pytestmark = pytest.mark.skipif(find_spec("torchmetrics") is None, reason="torchmetrics is not installed")

NUM_SAMPLES, BATCH_SIZE, LENGTH, NUM_EPOCHS = 16, 8, 4, 2
SEEN: list[int] = []
CALLS = {"hook": 0}

LAYOUTS = {
    "tp": {"tp": 2},
    "cp": {"cp": 2},
    "pp": {"pp": 2},
    "pp with dp_shard": {"pp": 2, "dp_shard": 2},
    "tp with dp_shard": {"dp_shard": 2, "tp": 2},
    "pp with cp": {"pp": 2, "cp": 2},
}


class Block(nn.Module):
    """A block with what may hide in one."""

    def __init__(self, is_normed, dropout, noise):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(LENGTH) if is_normed else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.calls, self.lengths, self.generator, self.noise = 0, [], torch.Generator(), noise

    def forward(self, x):
        self.calls += 1
        self.lengths.append(len(x))
        x = x * (1 + self.noise * torch.rand((), generator=self.generator, dtype=x.dtype))
        return self.norm(x + self.dropout(self.down(self.up(x).relu())))


def count_calls(*_):
    CALLS["hook"] += 1


class Net(TrainModule):
    """Blocks in a step that counts its samples in many places, before them and after them."""

    num_steps = 0

    def __init__(self, is_normed=False, dropout=0.0, noise=1.0, divisor=1.0):
        from torchmetrics import MeanMetric, SumMetric

        super().__init__()
        seed_everything(1, verbose=False)
        self.embed = nn.Linear(3, 4)
        self.layers = nn.ModuleList(Block(is_normed, dropout, noise) for _ in range(2))
        self.head = nn.Linear(4, 1)
        self.tp_plan = {
            f"layers.{i}.{name}": f"{way}wise" for i in (0, 1) for name, way in (("up", "col"), ("down", "row"))
        }
        self.layers[0].down.register_forward_hook(count_calls)
        self.noise, self.divisor = noise, divisor
        self.total, self.held = SumMetric(), {"total": SumMetric()}
        self.mean = MeanMetric()
        self.seen, self.seen_at_end, self.validated = [], [], []
        self.generator = torch.Generator()

    def sequence_dims(self, batch):
        return [None, 1, 1]

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        ids, x, y = batch
        SEEN.extend(ids.tolist())
        self.seen.extend(ids.tolist())
        type(self).num_steps += 1
        self.total.update(ids)
        self.held["total"].update(ids)
        noise = self.noise * torch.rand((), generator=self.generator, dtype=x.dtype)
        loss = nn.functional.mse_loss(self(x * (1 + noise)), y) / self.divisor
        self.seen_at_end.extend(ids.tolist())
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        ids, x, y = batch
        self.validated.extend(ids.tolist())
        self.mean.update(ids)
        self.log("val_loss", nn.functional.mse_loss(self(x), y))

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self(batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self):
        self.weights = {name: value.tolist() for name, value in self.trainer.strategy.full_model_state().items()}

    def counts(self):
        """Return what was counted here."""
        return {
            "seen": self.seen,
            "module-level list": [*SEEN],
            "validated": self.validated,
            "metric": self.total.metric_state["sum_value"].item(),
            "mean metric": self.mean.metric_state["weight"].item(),
            "metric in a dict": self.held["total"].metric_state["sum_value"].item(),
            "steps": type(self).num_steps,
            "next draw": torch.rand((), generator=self.generator).item(),
            "calls": [layer.calls for layer in self.layers],
            "hook": CALLS["hook"],
            "lengths": [sum(layer.lengths) for layer in self.layers],
            "draws": [torch.rand((), generator=layer.generator).item() for layer in self.layers],
            "seen at the end": self.seen_at_end,
        }


def loader(num_readers):
    x = torch.arange(NUM_SAMPLES * LENGTH * 3, dtype=torch.float64).reshape(NUM_SAMPLES, LENGTH, 3).sin()
    dataset = TensorDataset(torch.arange(NUM_SAMPLES), x, x.sum(-1, keepdim=True))
    return DataLoader(dataset, batch_size=BATCH_SIZE // num_readers)


def run(case):
    SEEN.clear()
    CALLS["hook"] = Net.num_steps = 0
    strategy = ParallelStrategy(**case.degrees) if world_size() > 1 else "single"
    readers = case.degrees.get("dp_shard", 1) if world_size() > 1 else 1
    sanity = 0 if "dp_shard" in case.degrees else 1  # in which all ranks read the same samples
    settings = {"max_epochs": NUM_EPOCHS, "accumulate_grad_batches": 2, "num_sanity_val_steps": sanity}
    trainer = double_trainer(strategy=strategy, **settings, **case.settings)
    module = Net(**case.options)
    trainer.fit(module, loader(readers), [loader(readers), loader(readers)])
    counts = module.counts()
    before = module.layers[0].calls
    trainer.predict(module, loader(readers))
    counts["predicted"] = module.layers[0].calls - before
    return trainer.strategy.data_rank, counts, module.weights


def run_all(cases):
    calm_down()
    return {name: run(case) for name, case in cases.items()}


@dataclass(frozen=True)
class Case:
    """Degrees of parallelism, options of the module, and settings of the trainer."""

    degrees: dict
    options: dict = field(default_factory=dict)
    settings: dict = field(default_factory=dict)

    @property
    def num_ranks(self):
        return math.prod(self.degrees.values())


CASES = {
    # another number for each micro-batch, which data ranks cut differently
    **{name: Case(degrees, {"noise": 0.0 if "dp_shard" in degrees else 1.0}) for name, degrees in LAYOUTS.items()},
    **{f"{name}, batch norm": Case(LAYOUTS[name], {"is_normed": True}) for name in ("tp", "pp")},
    "tp, dropout": Case(LAYOUTS["tp"], {"dropout": 0.5}),
    "tp, recomputed": Case(LAYOUTS["tp"], settings={"activation_checkpointing": "full"}),
    **{f"{name}, nan": Case(LAYOUTS[name], {"divisor": float("nan")}) for name in ("pp", "pp with dp_shard")},
}


@pytest.fixture(scope="module")
def compared():
    """Return what each rank of a case gave, and what one process gave: one launch for each number of ranks."""

    def run_on(num_ranks):
        cases = {name: case for name, case in CASES.items() if num_ranks in (1, case.num_ranks)}
        return run_ranks(run_all, num_ranks, cases)

    ends = once(run_on)

    def get(name):
        ((_, alone, weights),) = (of_rank[name] for of_rank in ends(1))
        return [of_rank[name] for of_rank in ends(CASES[name].num_ranks)], alone, weights

    return get


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_step_counts_is_counted_once(layout, compared):
    of_ranks, alone, weights = compared(layout)
    pp, groups = LAYOUTS[layout].get("pp", 1), {}
    for rank, (data_rank, counts, _) in enumerate(of_ranks):
        stage = rank * pp // len(of_ranks)
        groups.setdefault(data_rank, {}).setdefault(stage, []).append(counts)
        check_blocks(counts, alone, [block for block in (0, 1) if pp == 1 or block == stage])
    for name in ("seen", "module-level list", "validated"):
        lists = [[counts[name] for counts in chain(*stages.values())] for stages in groups.values()]
        assert all(list_ == same[0] for same in lists for list_ in same), name
        assert sorted(chain(*(same[0] for same in lists))) == sorted(alone[name]), name
    for name in ("metric", "mean metric", "metric in a dict"):  # one stage of a pipeline counts
        sums = [[counts[name] for counts in same] for stages in groups.values() for same in stages.values()]
        assert all(len(set(same)) == 1 for same in sums), name
        assert sum(same[0] for same in sums) == alone[name], name
    torch.testing.assert_close(of_ranks[0][2], weights, rtol=1e-9, atol=1e-12)


def check_blocks(counts, alone, blocks):
    """Check what is counted in steps, of which a rank has as many as one process, and in the blocks that it has."""
    for name in ("steps", "next draw"):
        assert counts[name] == alone[name], name
    for name in ("calls", "draws", "lengths") if len(alone["seen"]) == len(counts["seen"]) else ("calls", "draws"):
        assert [counts[name][block] for block in blocks] == [alone[name][block] for block in blocks], name
    if 0 in blocks:
        assert counts["hook"] == alone["hook"]
        assert counts["predicted"] == alone["predicted"]


@pytest.mark.parametrize("name", ["tp, batch norm", "pp, batch norm", "tp, dropout"])
def test_batch_norm_and_dropout_in_a_checked_block_count_and_draw_once_for_each_batch(name, compared):
    of_ranks, _, weights = compared(name)
    torch.testing.assert_close(of_ranks[0][2], weights, rtol=1e-9, atol=1e-12)


def test_recomputed_activations_leave_the_counts_of_the_step_alone(compared):
    of_ranks, alone, weights = compared("tp, recomputed")
    for _, counts, _ in of_ranks:
        assert counts["seen"] == alone["seen"]
        assert counts["metric"] == alone["metric"]
    torch.testing.assert_close(of_ranks[0][2], weights, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("layout", ["pp", "pp with dp_shard"])
def test_a_step_that_is_traced_for_nan_leaves_no_trace(layout, compared):
    of_ranks, alone, _ = compared(f"{layout}, nan")
    last = [counts for _, counts, _ in of_ranks][-1]
    for name in ("steps", "next draw"):
        assert last[name] == alone[name]
    for name in ("seen", "seen at the end", "module-level list", "validated"):
        assert len(last[name]) * LAYOUTS[layout].get("dp_shard", 1) == len(alone[name]), name
    assert last["calls"][1] == alone["calls"][1]
