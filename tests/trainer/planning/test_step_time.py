"""Step time: what is hidden behind the computation costs nothing, and what a step does is counted by kind."""

import sys
from pathlib import Path

import pytest
import torch
from planned_modules import BATCH, profile_of
from torch import nn

from echelon import TrainModule
from echelon.strategies.estimate.step_work import StepWork
from echelon.trainer.planning.step_time import DeviceSpeed, Links, speed_of, step_time

SPEED = DeviceSpeed(peak_flops=1e12, memory_bandwidth=1e12, link_bandwidth=1e9, matmul_share=0.5, attention_share=0.25)
WORK = StepWork(matmul_flops=5e11, attention_flops=5e11, moved_bytes=9e10)
"""One second of products, two of attention, 0.1 of moving."""
LINKS = Links(inside=1e9, between=None, devices_of_node=8)


def of(traffic, degrees, links=LINKS, **more):
    return step_time(SPEED, links, WORK, StepWork(), traffic, degrees, **more)


def test_a_device_computes_attends_and_moves_one_after_the_other():
    assert SPEED.seconds(WORK) == pytest.approx(3.1)


def test_many_small_operators_take_as_long_as_it_takes_to_start_them():
    assert SPEED.seconds(StepWork(moved_bytes=1.0, num_operators=1e6)) == pytest.approx(5.0)
    # half of them is not half as many, but two micro-batches are twice as many
    halved = StepWork(moved_bytes=1.0, num_operators=1e6).times(0.5)
    assert SPEED.seconds(halved) == pytest.approx(5.0)
    assert SPEED.seconds(halved.times(2)) == pytest.approx(10.0)


def test_shards_are_sent_beside_the_computation_and_sums_of_tensor_parallelism_are_not():
    shards = of({"dp_shard": 1.6e9}, {"dp_shard": 8})
    assert (shards.exchanging, shards.uncovered) == (0.0, 0.0)
    assert shards.total == pytest.approx(3.1)
    tensor = of({"tp": 1.6e9}, {"tp": 8})
    assert tensor.exchanging == pytest.approx(2.0)
    assert tensor.total == pytest.approx(5.1)
    much = of({"dp_shard": 8e9}, {"dp_shard": 8})
    assert much.total == pytest.approx(10.0)
    assert much.uncovered == pytest.approx(6.9)


def test_stages_that_wait_make_a_step_longer():
    assert of({}, {"pp": 4}, idle=0.5).total == pytest.approx(6.2)


@pytest.mark.parametrize(
    ("axis", "degrees", "seconds"),
    [
        ("dp_shard", {"dp_shard": 8}, 1.0),  # on one node
        ("dp_shard", {"dp_shard": 64}, 1.25),  # a ring leaves a node of 8 over 8 links
        ("dp_shard", {"dp_shard": 8, "tp": 8}, 10.0),  # one rank of each node
        ("dp_shard", {"dp_shard": 16, "tp": 4}, 5.0),
        ("dp_shard", {"dp_shard": 8, "dp_replicate": 8}, 1.0),
        ("dp_replicate", {"dp_shard": 8, "dp_replicate": 8}, 10.0),
        ("tp", {"dp_shard": 8, "tp": 8}, 1.0),
    ],
)
def test_what_crosses_nodes_takes_the_links_of_all_ranks_of_a_node(axis, degrees, seconds):
    links = Links(inside=1e9, between=1e8, devices_of_node=8)
    assert links.seconds(axis, 0.8e9, degrees) == pytest.approx(seconds)


def test_a_kind_of_device_has_its_own_speed():
    speed = speed_of("NVIDIA H100 80GB HBM3", torch.bfloat16)
    assert (speed.peak_flops, speed.memory_bandwidth) == (989.4e12, 3.35e12)
    assert speed_of("A100", torch.bfloat16).attention_share == 0.6
    assert speed_of("abacus", torch.bfloat16) is None
    assert speed_of("T4", torch.bfloat16) is None  # computes in it, but has no units for it


class Attention(TrainModule):
    """One attention between two layers."""

    is_causal = True

    def __init__(self):
        super().__init__()
        self.inside, self.outside = nn.Linear(8, 24), nn.Linear(8, 8)

    def training_step(self, batch, batch_idx):
        q, k, v = (part.view(-1, 16, 2, 4).transpose(1, 2) for part in self.inside(batch[0]).chunk(3, -1))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return self.outside(mixed.transpose(1, 2).flatten(2)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    @staticmethod
    def samples(number):
        return (torch.randn(number, 16, 8),)


class WholeAttention(Attention):
    is_causal = False


def test_what_a_step_does_is_counted_by_kind():
    whole, causal = profile_of(WholeAttention), profile_of(Attention)
    assert whole.work.matmul_flops + whole.work.attention_flops == whole.flops == causal.flops
    assert causal.work.attention_flops == whole.work.attention_flops / 2 > 0
    tokens = BATCH * 16
    # forward, and backward for weights and, but for the first layer, inputs
    assert whole.work.matmul_flops == 2 * tokens * 8 * (24 * 2 + 8 * 3)
    assert whole.work.moved_bytes > 4 * tokens * (8 + 24 + 8 + 8) * 2
    parameters = 4 * sum(parameter.numel() for parameter in whole.parameters)
    assert whole.work_of_update.moved_bytes >= 3 * parameters  # reads both, writes one
    assert 10 < whole.work.num_operators < 100


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("words", [("MPT 1B", "H100"), ("MPT 7B", "A100", "2048")], ids=" ".join)
def test_plans_are_near_published_runs(words, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    monkeypatch.delitem(sys.modules, "published_plans", raising=False)
    published = pytest.importorskip("published_plans")
    [row] = [row for row in published.ROWS if all(word in f"{row.model} {row.gpu} {row.length}" for word in words)]
    tokens = row.batch * row.accumulate * row.length / published.plan_of(row).time.total
    assert 0.75 < tokens / row.tokens < 1.25
