"""`Experts` computes what a loop over tokens computes, in float64 and, with torch's grouped product, in bfloat16."""

import pytest
import torch
from small import raises
from torch.nn import functional as F

from echelon import ConfigError, Experts, ModuleError
from echelon.strategies.experts.layer import grouped_product


def by_token(layer, x):
    """Return the output of a layer, token by token and expert by expert."""
    outputs = []
    for token in x.flatten(0, -2):
        scores = layer.router(token).softmax(-1)
        chosen = (scores + layer.selection_bias).topk(layer.top_k).indices
        output = layer.shared(token) if layer.shared is not None else torch.zeros_like(token)
        for expert in chosen:
            gate, up = (token @ layer.stack.gate_up[expert]).chunk(2)
            output = output + scores[expert] / scores[chosen].sum() * ((F.silu(gate) * up) @ layer.stack.down[expert])
        outputs.append(output)
    return torch.stack(outputs).view_as(x)


@pytest.mark.parametrize("settings", [{}, {"top_k": 1}, {"top_k": 4, "shared_hidden": 5}])
def test_the_layer_is_a_loop_over_tokens_and_their_experts(settings):
    torch.manual_seed(1)
    layer, x = Experts(6, 8, 4, **settings).double(), torch.randn(2, 5, 6, dtype=torch.float64)
    layer.selection_bias.copy_(torch.tensor([0.3, 0.0, -0.3, 0.1]))
    own = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    expected = torch.autograd.grad(by_token(layer, x).square().sum(), list(layer.parameters()))
    torch.testing.assert_close(layer(x), by_token(layer, x), rtol=0, atol=1e-12)
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-12)
    assert layer(x)._base is None  # fully_shard warns of units that return a view


def test_torchs_grouped_product_in_bfloat16_is_that_of_a_loop_with_an_expert_without_tokens():
    torch.manual_seed(1)
    rows, weights = torch.randn(9, 16).bfloat16().requires_grad_(), torch.randn(3, 16, 8).bfloat16().requires_grad_()
    counts = torch.tensor([4, 0, 5])
    grouped = grouped_product(rows, weights, counts)
    exact = grouped_product(rows.double(), weights.double(), counts)
    torch.testing.assert_close(grouped.double(), exact, rtol=2e-2, atol=2e-2)
    own = torch.autograd.grad(grouped.square().sum(), (rows, weights))
    loop = torch.autograd.grad(exact.square().sum(), (rows, weights))
    for gradient, expected in zip(own, loop, strict=True):
        assert (gradient - expected).norm() < 0.02 * expected.norm()
    assert not own[1][1].any()


def test_sizes_that_make_no_layer_are_refused():
    with raises(ConfigError, "hidden of Experts must be >= 1, got 0"):
        Experts(4, 0, 2)
    with raises(ConfigError, "top_k of Experts must be <= num_experts=2, got 3"):
        Experts(4, 4, 2, top_k=3)


def limited_by_token(layer, x):
    """Return the output of a layer with a capacity, sequence by sequence and token by token, and what it dropped."""
    outputs, dropped = [], 0
    for sequence in x:
        taken = [0] * layer.num_experts
        for token in sequence:
            scores = layer.router(token).softmax(-1)
            chosen = scores.topk(layer.top_k).indices
            output = layer.shared(token)
            for expert in chosen.tolist():
                if taken[expert] == layer.limit.capacity:
                    dropped += 1
                    continue
                taken[expert] += 1
                gate, up = (token @ layer.stack.gate_up[expert]).chunk(2)
                weight = scores[expert] / scores[chosen].sum()
                output = output + weight * ((F.silu(gate) * up) @ layer.stack.down[expert])
            outputs.append(output)
    return torch.stack(outputs).view_as(x), dropped


def test_an_expert_takes_the_first_tokens_of_each_sequence_up_to_its_capacity():
    torch.manual_seed(1)
    layer = Experts(6, 8, 4, top_k=2, shared_hidden=5, capacity=3).double()
    x = torch.randn(3, 7, 6, dtype=torch.float64, requires_grad=True)
    expected, dropped = limited_by_token(layer, x)
    assert 0 < dropped < 3 * 7 * 2
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)
    inputs = [x, *layer.parameters()]
    own = torch.autograd.grad(layer(x).square().sum(), inputs)
    gradients = torch.autograd.grad(expected.square().sum(), inputs)
    torch.testing.assert_close(own, gradients, rtol=0, atol=1e-12)
    # what is dropped of a sequence depends on nothing else, nor does it on the tokens that follow
    torch.testing.assert_close(layer(x[1:2, :5]), expected[1:2, :5], rtol=0, atol=1e-12)


def test_a_capacity_needs_sequences():
    with raises(ModuleError, "it got tokens of shape (5, 'width') without sequences; pass (batch, sequence, width)"):
        Experts(4, 4, 2, capacity=1)(torch.randn(5, 4))
    with raises(ConfigError, "capacity of Experts must be >= 0, got -1"):
        Experts(4, 4, 2, capacity=-1)


def test_the_balance_is_that_of_the_switch_transformer_and_pushes_towards_unused_experts():
    torch.manual_seed(1)
    layer, x = Experts(6, 8, 4, returns_balance=True).double(), torch.randn(2, 5, 6, dtype=torch.float64)
    layer.load.copy_(torch.tensor([0.7, 0.1, 0.1, 0.1]))
    with pytest.warns(UserWarning, match="add callbacks=ExpertBalance"):
        output, balance = layer(x)
    probabilities = layer.router(x).softmax(-1).mean((0, 1))
    assert output.shape == x.shape
    assert balance.shape == x.shape[:-1]
    torch.testing.assert_close(balance.mean(), 4 * (layer.load * probabilities).sum(), rtol=0, atol=1e-12)
    layer.eval()  # nobody warns where nothing is trained
    layer.load.fill_(0.25)
    torch.testing.assert_close(layer(x)[1], torch.ones(2, 5, dtype=torch.float64), rtol=0, atol=1e-12)
