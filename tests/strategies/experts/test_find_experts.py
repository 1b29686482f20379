"""Experts are found in unmodified modules, and whatever ep cannot deal is refused before a process starts."""

import pytest
import torch
from small import quiet, raises
from torch import nn

from echelon import ConfigError, Experts, ParallelStrategy, TrainModule
from echelon.strategies.experts.find_experts import check_experts, find_experts

TEXT = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 32, "vocab_size": 24, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
MODELS = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "GptOss": {"num_local_experts": 4, "layer_types": ["full_attention"] * 2},
    "DeepseekV3": {
        "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 0,
    },
}  # fmt: skip


class Stack(nn.Module):
    """The weights of four experts, in the layout that `find_experts` looks for."""

    def __init__(self):
        super().__init__()
        self.up, self.bias = nn.Parameter(torch.zeros(4, 3, 2)), nn.Parameter(torch.zeros(4, 3))

    def forward(self, tokens, experts, weights):
        return tokens


class Model(TrainModule):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def training_step(self, batch):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())


class ShardsItself(Model):
    def configure_sharding(self, mesh):
        pass


def planned(layer, plan):
    model = Model(layer)
    model.ep_plan = plan
    return model


def with_norm():
    stack = Stack()
    stack.norm = nn.LayerNorm(2)
    return stack


def of_two_lengths():
    stack = Stack()
    stack.scale = nn.Parameter(torch.zeros(3))
    return stack


class Tied(Model):
    def __init__(self):
        super().__init__(Stack())
        self.head = nn.Module()
        self.head.weight = self.layer.bias


@pytest.mark.parametrize("name", MODELS)
def test_the_experts_of_transformers_are_found_with_no_plan_given(name):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**TEXT | MODELS[name])
    with torch.device("meta"):
        model = Model(getattr(transformers, f"{name}ForCausalLM")(config))
    assert find_experts(model) == {f"layer.model.layers.{layer}.mlp.experts": 4 for layer in range(2)}


def test_stacked_layers_are_found_and_others_are_not():
    module = nn.ModuleDict({
        "experts": Experts(4, 6, 8, shared_hidden=2), "own": Stack(), "attention": nn.MultiheadAttention(4, 2),
        "bilinear": nn.Bilinear(2, 2, 4), "convolution": nn.Conv1d(2, 4, 3),
    })  # fmt: skip
    assert find_experts(module) == {"experts.stack": 8, "own": 4}
    assert find_experts(planned(nn.ModuleList([Stack(), Stack()]), {"layer.1": "ep_dispatch_experts"})) == {
        "layer.1": 4
    }


MISTAKES = {
    "not divisible": (lambda: Model(Stack()), "ep=3 does not divide the 4 experts of layer; choose one of 2, 4."),
    "no experts": (lambda: Model(nn.Linear(2, 2)), "no layer of experts was found in Model, which has Linear"),
    "a plan that matches nothing": (
        lambda: planned(Stack(), {"layr": "ep_dispatch_experts"}),
        "names 'layr', which matches none of its layers. Did you mean 'layer'?",
    ),
    "shared experts in the plan": (
        lambda: planned(nn.Linear(2, 4), {"layer": "ep_dispatch_experts"}),
        "layer is to be dealt by ep, but its forward takes (input)",
    ),
    "a norm among the experts": (lambda: planned(with_norm(), {"layer": "ep_dispatch_experts"}), "its norm.weight"),
    "two first dimensions": (
        lambda: planned(of_two_lengths(), {"layer": "ep_dispatch_experts"}),
        "the first dimension of its parameters is not one number of experts",
    ),
    "a tied parameter": (Tied, "layer.bias is the same parameter as head.weight"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_modules_whose_experts_cannot_be_dealt_are_refused_by_name(mistake):
    make, words = MISTAKES[mistake]
    with raises(ConfigError, words):
        check_experts(make(), 3 if mistake == "not divisible" else 2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ep": 0}, "ep must be a number of ranks >= 1, got 0"),
        ({"ep": "auto"}, "ep must be a number of ranks >= 1, got 'auto'"),
        ({"ep": 2, "tp": 2, "sequence_parallel": True}, "got sequence_parallel=True; leave one out"),
    ],
)
def test_settings_that_do_not_go_with_ep_are_refused_at_construction(settings, words):
    with raises(ConfigError, words):
        ParallelStrategy(**settings)


@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        (lambda: Model(Stack()), {"dp_shard": 2, "ep": 4}, "ep=4 must divide dp_shard=2"),
        (lambda: Model(nn.Linear(2, 2)), {"dp_shard": 2, "ep": 2}, "no layer of experts was found in Model"),
        (lambda: ShardsItself(Stack()), {"dp_shard": 2, "ep": 2}, "shards them in its own configure_sharding"),
        (
            lambda: Model(Stack()),
            {"tp": 2, "ep": 2, "tp_plan": {"layer": "grouped_gemm"}},
            "is for mixtures of experts and similar layers, which tp does not cut; leave these layers out of tp_plan",
        ),
        (
            lambda: Model(Stack()),
            {"tp": 2, "ep": 2, "tp_plan": {"layer": "colwise"}},
            "'colwise' cannot cut 'layer', which is of class Stack",
        ),
    ],
)
def test_what_is_known_before_processes_start_is_refused_in_the_caller(make, settings, words):
    with raises(ConfigError, words):
        devices = 2 * settings.get("tp", 1)
        quiet(strategy=ParallelStrategy(**settings), devices=devices).fit(make(), [torch.zeros(2)])
