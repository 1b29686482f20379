"""Tensor parallelism under everything that counts or decides: as in one process, and the same on all ranks."""

from __future__ import annotations

import json

import pytest
import torch
from as_rank import attempt, calm_down, double_trainer, world_size
from once import once
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Loss, TrainModule, seed_everything
from echelon.callbacks import EMAWeightAveraging, LossSpikePolicy, NaNGuard
from echelon.common.errors import NonFiniteError
from echelon.strategies.model_parallel import ParallelStrategy
from echelon.strategies.state.dtensor import gather_whole, local_shard
from echelon.testing import run_ranks

NUM_SAMPLES, BATCH_SIZE, NUM_STEPS = 40, 8, 10
DP_SHARD = pytest.mark.parametrize("dp_shard", [pytest.param(1, marks=pytest.mark.only_in_sweep), 2])


def data():
    x = torch.arange(4.0 * NUM_SAMPLES, dtype=torch.float64).reshape(-1, 4).sin()
    return TensorDataset(x, x.sum(1, keepdim=True) * 0.5)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8).double(), nn.Linear(8, 4).double()

    def forward(self, x):
        return self.down(self.up(x).relu())


class Net(TrainModule):
    """Layers that are cut, others that are not, dropout between them and a buffer; an outlier in one step."""

    def __init__(self, dropout=0.0, outlier_at=None, value=1e5):
        super().__init__()
        seed_everything(1, verbose=False)
        self.block, self.dropout, self.head = Block(), nn.Dropout(dropout), nn.Linear(4, 1).double()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.tp_plan = {"block.up": "colwise", "block.down": "rowwise"}
        self.outlier_at, self.value = outlier_at, value

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.seen += x.mean().detach()
        errors = (self.head(self.dropout(self.block(x))) - y).square()
        units = (x[:, :1].abs() * 4).round() + 1
        self.log("samples", len(x), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("units", units.sum(), reduce_fx="sum", on_step=False, on_epoch=True)
        scale = self.value if self.trainer.global_step == self.outlier_at else 1.0
        return Loss((errors * units).sum() * scale, units.sum())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def train(dp_shard, module, *callbacks, **settings):
    """Train in one process, or on 2 x `dp_shard` ranks; return the weights as a whole, and what this rank holds."""
    calm_down()
    strategy = ParallelStrategy(tp=2, dp_shard=dp_shard) if world_size() > 1 else "single"
    quiet = {"max_steps": NUM_STEPS, "num_sanity_val_steps": 0, "callbacks": list(callbacks)}
    trainer = double_trainer(strategy=strategy, **{**quiet, **settings})
    loader = DataLoader(data(), batch_size=BATCH_SIZE // (dp_shard if world_size() > 1 else 1))
    trainer.fit(module, loader)
    whole = gather_whole(module.state_dict(), is_kept=True)
    held = {name: local_shard(value).tolist() for name, value in module.named_parameters()}
    return trainer, whole, held


def count(dp_shard):
    policy = LossSpikePolicy(warmup=2)
    module = Net(outlier_at=4)
    trainer, whole, _ = train(dp_shard, module, policy, NaNGuard(), gradient_clip_val=0.5)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    weights = {name: value.tolist() for name, value in whole.items() if name != "seen"}
    decisions = [{name: decision[name] for name in ("global_step", "grad_norm")} for decision in policy.decisions]
    return weights, metrics, decisions, trainer.samples_seen


def run_cases():
    """Return what each run gives on this rank, or its error."""
    cases = (count, drop, overflow, stop) if world_size() > 1 else (count,)
    return {case: attempt(case, world_size() // 2) for case in cases}


@pytest.fixture(scope="module")
def ends():
    """Return what a run gave on each of a number of ranks, which start once."""
    of_all = once(lambda num_ranks: run_ranks(run_cases, num_ranks))

    def of_case(case, num_ranks):
        results = [found[case] for found in of_all(num_ranks)]
        assert case is stop or not isinstance(results[0], str), results[0]
        return results

    return of_case


@DP_SHARD
def test_counts_norms_and_decisions_are_those_of_one_process(dp_shard, ends):
    results = ends(count, 2 * dp_shard)
    assert all(result == results[0] for result in results)
    (alone,) = ends(count, 1)
    assert results[0][1]["samples"] == NUM_SAMPLES
    for found, expected in zip(results[0], alone, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert [decision["global_step"] for decision in alone[2]] == [4]


def drop(dp_shard):
    averaging = EMAWeightAveraging(decay=0.5)
    _, whole, held = train(dp_shard, Net(dropout=0.5), averaging)
    return json.dumps({name: value.tolist() for name, value in whole.items()}), held


@DP_SHARD
def test_dropout_leaves_the_parts_of_a_replica_equal_to_the_bit(dp_shard, ends):
    results = ends(drop, 2 * dp_shard)
    assert len({whole for whole, _ in results}) == 1
    for rank, (_, held) in enumerate(results):  # what tensor parallelism does not cut, each of a replica's ranks has
        for name in ("head.weight", "head.bias", "block.down.bias"):
            assert held[name] == results[rank // 2 * 2][1][name]


def stop(dp_shard):
    with pytest.raises(NonFiniteError) as caught:
        train(dp_shard, Net(outlier_at=2, value=float("nan")), NaNGuard())
    return str(caught.value)


def test_a_loss_that_is_not_finite_ends_the_run_on_all_ranks(ends):
    messages = ends(stop, 4)
    assert len(set(messages)) == 1 and messages[0].startswith("Rank 0: The loss is nan at global_step 2")


class Overflowing(Net):
    """Gradients that are not finite in one step, on one rank and of one part that is cut."""

    def __init__(self):
        super().__init__()
        self.scales = []

    def training_step(self, batch, batch_idx):
        self.scales.append(self.trainer.scaler.get_scale())
        return super().training_step([part.float() for part in batch], batch_idx)

    def on_after_backward(self):
        strategy = self.trainer.strategy
        if len(self.scales) == 4 and strategy.rank == strategy.world_size - 1:
            local_shard(self.block.up.weight.grad).fill_(torch.inf)


def overflow(dp_shard):
    module = Overflowing().float()
    _, whole, held = train(dp_shard, module, precision="16-mixed", max_steps=8)
    return json.dumps([module.scales, {name: value.tolist() for name, value in whole.items()}]), held


@DP_SHARD
def test_gradients_that_overflow_in_one_part_skip_the_update_of_all(dp_shard, ends):
    results = ends(overflow, 2 * dp_shard)
    assert len({whole for whole, _ in results}) == 1
    scales, weights = json.loads(results[0][0])
    assert scales[4] == scales[3] / 2 == scales[-1], scales
    assert "NaN" not in json.dumps(weights)
    for rank, (_, held) in enumerate(results):
        assert held["head.weight"] == results[rank // 2 * 2][1]["head.weight"]
