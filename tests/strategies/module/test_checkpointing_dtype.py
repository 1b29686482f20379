"""Activation checkpointing recomputes in the step's default dtype, outside of which backward runs."""

import pytest
import torch
from small import Regression, loader, quiet
from torch import nn

from echelon import seed_everything


class Block(nn.Module):
    """Creates a tensor, like a block that creates a mask."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        mask = torch.ones(x.shape).triu()
        return self.linear(x * mask).tanh()


class Blocks(Regression):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))

    def forward(self, x):
        return self.net(self.blocks(x))


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_a_block_that_makes_a_mask_is_computed_again_in_the_same_dtype(precision, mode):
    weights = []
    for setting in (None, mode):
        seed_everything(3)
        module = Blocks()
        quiet(precision=precision, activation_checkpointing=setting, max_steps=3).fit(module, loader())
        weights.append([parameter.tolist() for parameter in module.parameters()])
    assert weights[0] == weights[1]
    assert torch.get_default_dtype() is torch.float32
