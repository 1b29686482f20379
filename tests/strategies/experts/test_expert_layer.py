"""`Experts` computes what a loop over tokens computes, in float64 and, with torch's grouped product, in bfloat16."""

import pytest
import torch
from small import raises
from torch.nn import functional as F

from echelon import ConfigError, Experts
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
