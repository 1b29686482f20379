"""A skeleton runs a module as it was, and names one that has exchanged its submodules since."""

import torch
from small import raises
from torch import nn

from echelon import ModuleError
from echelon.strategies.tensor_parallel.check.skeleton import Skeleton


def test_a_skeleton_runs_with_the_weights_of_now():
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    skeleton = Skeleton(module)
    with torch.no_grad():
        module[0].weight.fill_(1.0)
    x = torch.randn(3, 2)
    assert torch.equal(skeleton.run(module, lambda parameter: parameter, x), module(x))


class Switched(nn.Module):
    """Adds nothing while it is off, as adapters do."""

    def __init__(self):
        super().__init__()
        self.is_off, self.active, self.weight = False, ["first"], nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x if self.is_off else x + len(self.active) * self.weight


def test_a_skeleton_follows_switches_that_were_moved_since():
    module = nn.Sequential(Switched())
    skeleton = Skeleton(module)
    module[0].active = ["first", "second"]
    assert torch.equal(skeleton.run(module, lambda parameter: parameter, torch.ones(2)), torch.full((2,), 3.0))
    module[0].is_off = True
    assert torch.equal(skeleton.run(module, lambda parameter: parameter, torch.ones(2)), torch.ones(2))


def test_a_module_that_exchanges_its_submodules_is_named():
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    skeleton = Skeleton(module)
    module[1] = nn.Sequential(nn.Dropout())
    with raises(ModuleError, "Sequential exchanges its submodules while it runs (1.0, a Dropout", "tp_plan"):
        skeleton.run(module, lambda parameter: parameter, torch.randn(3, 2))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 2

    def forward(self, x):
        return x * self.scale


def test_a_skeleton_of_a_compiled_module_does_not_run_the_module_itself():
    module = nn.Sequential(Scaled())
    module[0].compile(backend="eager")
    module.compile(backend="eager")
    skeleton = Skeleton(module)
    module[0].scale = 3  # as cutting changes numbers of heads
    assert torch.equal(skeleton.run(module, lambda parameter: parameter, torch.ones(2)), torch.full((2,), 2.0))
    assert torch.equal(module(torch.ones(2)), torch.full((2,), 3.0))
