"""Plans are taken from their sources in order, and impossible ones are refused before processes start."""

import re

import pytest
import torch
from torch import nn

from echelon import TrainModule
from echelon.common.errors import ConfigError
from echelon.strategies.tensor_parallel.find_plan import find_plan


def chain(width=16):
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 8), nn.LayerNorm(8))


class Net(nn.Module):
    def __init__(self, num_heads=2):
        super().__init__()
        self.table, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)
        self.blocks = nn.ModuleList([chain(), chain()])
        self.attention = nn.MultiheadAttention(8, num_heads)


class Trained(TrainModule):
    def __init__(self, **parts):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)
        for name, part in parts.items():
            setattr(self, name, part)


FOUND = {
    "blocks.0.0": "colwise",
    "blocks.0.3": "rowwise",
    "blocks.1.0": "colwise",
    "blocks.1.3": "rowwise",
    "attention": "attention",
}


def test_known_layers_are_found():
    plan = find_plan(Net())
    assert dict(plan.words) == FOUND
    assert plan.source == "the plan that was found"


def test_a_given_plan_comes_before_that_of_the_module_and_that_before_those_of_its_parts():
    net = Net()
    net.blocks.tp_plan = {"0.0": "colwise_gather_output"}
    assert dict(find_plan(net).words) == {"blocks.0.0": "colwise_gather_output"}
    net.tp_plan = {"blocks.[01].0": "colwise_gather_output"}
    assert list(find_plan(net).words) == ["blocks.0.0", "blocks.1.0"]
    assert dict(find_plan(net, {"head": "colwise_gather_output"}).words) == {"head": "colwise_gather_output"}


def test_the_plan_of_a_model_of_transformers_inside_the_module_is_taken_without_experts():
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    plan = find_plan(Trained(model=transformers.MixtralForCausalLM(config)))
    assert plan.words["model.model.layers.0.self_attn.q_proj"] == "colwise"
    assert plan.words["model.lm_head"] == "colwise_gather_output"
    assert not any("experts" in name for name in plan.words)


def test_layers_that_a_step_may_use_in_any_way_are_not_found():
    assert list(find_plan(Trained(net=chain())).words) == ["net.0", "net.3"]
    with pytest.raises(
        ConfigError, match=r"no layer to cut was found in Trained, which consists of Linear; give tp_plan"
    ):
        find_plan(Trained())


def test_tied_layers_are_cut_alike():
    net = Net()
    net.head.weight = net.table.weight
    plan = find_plan(net, {"head": "colwise_gather_output"})
    assert dict(plan.words) == {"table": "embedding_rowwise", "head": "colwise_gather_output"}
    plan.validate(net, 2)


def test_a_plan_is_found_on_the_meta_device():
    with torch.device("meta"):
        net = Net()
    plan = find_plan(net)
    plan.validate(net, 2)
    assert dict(plan.words) == FOUND


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"blocks.*.7": "colwise"}, r"tp_plan names 'blocks\.\*\.7', which matches no submodule of Net\. Did you mean"),
        ({"head": "columnwise"}, r"plan for 'head' must be a word .* got 'columnwise'\. Did you mean 'colwise'\?"),
        ({"head": 3}, r"must be a word or a ParallelStyle of torch, got 3"),
        ({"head": "moe_tp_experts"}, r"'moe_tp_experts' for 'head' is for mixtures of experts"),
        ({"head": "packed_colwise:x"}, r"got 'packed_colwise:x'"),
        (
            {"table": "colwise"},
            r"'colwise' cannot cut 'table', which is of class Embedding; use 'embedding_rowwise' or",
        ),
        ({"attention": "colwise"}, r"cannot cut 'attention', which is of class MultiheadAttention; use 'attention'"),
        (
            {"blocks.0.4": "rowwise"},
            r"cannot cut 'blocks\.0\.4', which is of class LayerNorm; cut the layers inside it",
        ),
        ({"head": "attention"}, r"cannot cut 'head', which is of class Linear; use 'colwise'"),
        ({}, r"tp_plan must map names of layers to words, got \{\}"),
        ("colwise", r"tp_plan must map names of layers to words, got 'colwise'"),
    ],
)
def test_a_plan_that_means_nothing_is_refused(plan, message):
    with pytest.raises(ConfigError, match=message):
        find_plan(Net(), plan)


def test_tables_that_cannot_be_cut_are_refused():
    net = Net()
    net.table.max_norm = 1.0
    with pytest.raises(ConfigError, match=r"'table' is an Embedding with max_norm=1\.0"):
        find_plan(net, {"table": "embedding_rowwise"})


def test_shards_of_the_sequence_need_blocks():
    with pytest.raises(
        ConfigError, match=r"sequence_parallel=True shards the sequence inside blocks .* chain has none|Sequential has"
    ):
        find_plan(chain(), sequence_parallel=True)


@pytest.mark.parametrize(
    ("plan", "tp", "message"),
    [
        ({"attention": "attention"}, 4, r"attention has 2 num_heads; choose tp=2, or give"),
        ({"head": "colwise_gather_output"}, 5, r"head\.weight has 12 .* too few for a part on each rank"),
        (
            {"blocks.*.0": "packed_colwise:3", "blocks.*.3": "rowwise"},
            2,
            r"blocks\.0\.0\.weight has 16 .* not a multiple of 3 x 2",
        ),
    ],
)
def test_what_tp_does_not_divide_is_refused(plan, tp, message):
    net = Net()
    with pytest.raises(ConfigError, match=rf"tp={tp} does not divide what tp_plan cuts: .*{message}"):
        find_plan(net, plan).validate(net, tp)


def test_heads_of_transformers_that_tp_does_not_divide_are_refused():
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=6,
        num_key_value_heads=3,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.self_attn has 3 num_key_value_heads, neither"):
        find_plan(model).validate(model, 4)


def test_one_tensor_cut_in_two_ways_is_refused():
    net = Net()
    net.head.weight = net.table.weight
    plan = find_plan(net, {"table": "embedding_colwise", "head": "colwise_gather_output"})
    with pytest.raises(ConfigError, match=r"cuts it in two ways, along dimension 0 and along dimension 1; give both"):
        plan.validate(net, 2)


def test_the_table_has_what_a_rank_holds():
    net = Net()
    plan = find_plan(net, {"blocks.*.0": "colwise", "blocks.*.3": "rowwise", "attention": "replicate"})
    rows = [re.split(r"  +", line) for line in plan.table(net, 2).splitlines()]
    assert rows == [
        ["part", "word", "shape on a rank of the whole", "bytes on a rank"],
        ["blocks.*.0 (x 2)", "colwise", "weight 8x8 of 16x8, bias 8 of 16", "576"],
        ["blocks.*.3 (x 2)", "rowwise", "weight 8x8 of 8x16", "576"],
        ["attention", "replicate", "whole", "1,152"],
        ["all others", "whole", "944"],
        ["sum", "of 4,336", "3,248"],
    ]


def test_the_table_counts_the_sections_of_packed_weights():
    net = Net()
    table = find_plan(net, {"attention": "attention"}).table(net, 2)
    assert (
        "in_proj_weight 12x8 of 24x8 (3 sections), in_proj_bias 12 of 24 (3 sections), out_proj.weight 8x4 of 8x8"
        in table
    )
