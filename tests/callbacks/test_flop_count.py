"""Counting FLOPs leaves compiled modules compiled, and a compiled module can be copied and sent."""

import copy
import pickle

import pytest
import torch
from small import Regression, loader, quiet
from torch._dynamo.testing import CompileCounterWithBackend

from echelon import ThroughputMonitor, seed_everything
from echelon.testing import run_ranks


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@pytest.mark.parametrize("counts", ["summary", "throughput", "both"])
def test_a_module_whose_flops_were_counted_is_compiled(counts):
    counter = CompileCounterWithBackend("eager")
    module = Regression()
    if counts != "throughput":
        module.example_input_array = torch.zeros(2, 2)
    callbacks = [] if counts == "summary" else [ThroughputMonitor(available_flops=1e12)]
    quiet(
        compile={"backend": counter}, enable_model_summary=counts != "throughput", max_steps=3, callbacks=callbacks
    ).fit(module, loader())
    assert counter.frame_count == 1


def test_the_numbers_of_a_compiled_run_do_not_depend_on_the_count():
    weights = []
    for callbacks in ([], [ThroughputMonitor(available_flops=1e12)]):
        seed_everything(1)
        module = Regression()
        quiet(compile={"backend": "eager"}, max_steps=3, callbacks=callbacks).fit(module, loader())
        weights.append(module.net.weight.tolist())
    assert weights[0] == weights[1]


def fitted():
    module = Regression()
    quiet(compile={"backend": "eager"}, max_steps=1).fit(module, loader())
    return module


def test_a_module_fitted_with_compile_can_be_pickled_copied_and_fitted_in_other_processes():
    module = fitted()
    for other in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert torch.equal(other.net.weight, module.net.weight)
        quiet(max_steps=1).fit(other, loader())
    assert run_ranks(module.net.weight.tolist, 1) == [module.net.weight.tolist()]
