"""The submodules that become units, and how the plan shows them."""

import pytest
from torch import nn

from echelon import EchelonError
from echelon.strategies.fsdp import FSDPStrategy
from echelon.strategies.module.precision import Precision
from echelon.strategies.parallel.mesh import Degrees
from echelon.strategies.parallel.sharding_policy import ShardingOptions, find_units, make_plan


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.experts = nn.Linear(4, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.tail = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 10), nn.ReLU())


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (None, ["blocks.0", "blocks.1"]),
        (Block, ["blocks.0", "blocks.1"]),
        ((nn.Embedding, nn.Sequential), ["embed", "tail"]),
        (nn.ModuleList, []),
        (50, ["blocks.0", "blocks.1", "tail.1"]),
        (100, ["blocks.0", "blocks.1"]),
        (lambda name, part: name.endswith("up"), ["blocks.0.up", "blocks.1.up"]),
        (
            lambda name, part: "blocks" in name and "experts" not in name,
            ["blocks.0", "blocks.0.up", "blocks.1", "blocks.1.up"],
        ),
    ],
    ids=["none", "a class", "classes", "no forward", "50", "100", "a name", "nested"],
)
def test_a_policy_chooses_units(policy, expected):
    if not expected:
        with pytest.raises(ValueError, match="matches no submodule of Model"):
            find_units(Model(), policy)
        return
    assert find_units(Model(), policy) == expected


def test_a_part_that_shares_a_parameter_with_the_rest_stays_with_the_rest():
    model = Model()
    model.blocks[1].up.weight = nn.Parameter(model.blocks[1].up.weight.detach())
    model.blocks[0].up.weight = model.blocks[1].up.weight
    assert find_units(model, (Block, nn.Embedding)) == ["embed"]
    model = Model()
    model.again = model.embed  # the part itself, twice, is still one part
    assert find_units(model, nn.Embedding) == ["embed"]


def test_gradients_that_are_sparse_are_refused():
    table = nn.Sequential(nn.EmbeddingBag(8, 4, sparse=True), nn.Linear(4, 2))
    with pytest.raises(EchelonError, match="0 of Sequential must have dense gradients"):
        find_units(table, None)
    table[0].requires_grad_(False)
    assert not find_units(table, None)


def test_batch_norms_are_units_where_asked():
    assert find_units(Model(), None, with_batch_norms=True) == ["blocks.0", "blocks.1", "tail.0"]


def test_the_plan_counts_each_parameter_once():
    plan = make_plan(Model(), ["blocks.0", "blocks.0.up", "blocks.1"], True, "dp_shard=4", 4)
    sizes = {unit.name: (unit.num_parameters, unit.bytes_a_rank, unit.num_bytes) for unit in plan.units}
    up = (30, 4 * (2 * 4 + 2), 120)
    assert sizes["blocks.0.up"] == up
    assert sizes["blocks.0"] == (84, 2 * 4 * (2 * 6 + 2), 336)
    assert sizes["blocks.1"] == (114, sizes["blocks.0"][1] + up[1], 456)
    assert sum(size[0] for size in sizes.values()) == sum(parameter.numel() for parameter in Model().parameters())


def test_the_plan_can_be_read():
    assert str(make_plan(Model(), ["blocks.0", "blocks.1"], 2, "dp_replicate=1 x dp_shard=4", 4)).splitlines() == [
        "Sharded over dp_replicate=1 x dp_shard=4:",
        "unit      class    parameters  bytes a rank  bytes in all  after forward",
        "blocks.0  Block    114         152           456           1/2 kept",
        "blocks.1  Block    114         152           456           1/2 kept",
        "(root)    Model    98          116           392           kept",
        "all       3 units  326         420           1,304",
    ]


def test_a_strategy_plans_before_it_runs():
    assert [unit.name for unit in FSDPStrategy(policy=Block).plan(Model()).units] == ["blocks.0", "blocks.1", ""]


@pytest.mark.parametrize(
    ("world_size", "num_nodes", "replicate", "expected"),
    [(4, 1, 1, (1, 4)), (4, 1, 2, (2, 2)), (8, 4, "nodes", (4, 2)), (4, 1, "nodes", (2, 2)), (2, 1, 2, (2, 1))],
)
def test_ranks_shard_where_they_do_not_replicate(world_size, num_nodes, replicate, expected):
    degrees = Degrees.of(world_size, num_nodes, replicate)
    assert (degrees.dp_replicate, degrees.dp_shard, degrees.world_size) == (*expected, world_size)


def test_a_layer_of_another_dtype_is_a_unit_of_its_own():
    model = Model()
    model.blocks[0].experts[1].double()
    model.tail[0].bfloat16()
    named = ["blocks.0", "blocks.0.experts.1", "blocks.1", "tail.0"]
    assert ShardingOptions().find_units(model, Precision("32-true")) == named
    assert ShardingOptions().find_units(model, Precision("64-true")) == ["blocks.0", "blocks.1"]
    model.requires_grad_(False)  # torch gathers a unit in any dtypes
    assert ShardingOptions().find_units(model, Precision("32-true")) == ["blocks.0", "blocks.1"]
