"""However many classes of modules are compiled, each stays so; modules of one class share what was compiled."""

from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from echelon.strategies.module.compiled_calls import compile_calls


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def frames_of(modules):
    """Return how many frames are compiled to train modules and to evaluate them."""
    counter = CompileCounterWithBackend("eager")
    for module in modules:
        compile_calls(module, partial(torch.compile, backend=counter))
    for is_training in (True, False):
        for module in modules:
            with torch.set_grad_enabled(is_training):
                module.train(is_training)(torch.ones(2, 4))
    return counter.frame_count


def test_many_classes_stay_below_the_limit_of_recompilations():
    kinds = [type(f"Part{index}", (Part,), {}) for index in range(torch._dynamo.config.recompile_limit)]
    assert frames_of([kind() for kind in kinds]) == 2 * len(kinds)


def test_modules_of_one_class_share_what_was_compiled():
    assert frames_of([Part() for _ in range(20)]) == 2
