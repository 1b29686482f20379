"""Steps on shards equal those on DTensors bitwise, and leave the optimizer in the same state."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from echelon.strategies.parallel.shard_update import step_on_shards
from echelon.testing import run_ranks
from echelon.trainer.savings.updates import Updates

KINDS = {
    "ASGD": {},
    "Adadelta": {},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.1},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "SGD": {"momentum": 0.9, "nesterov": True},
}


def sharded_net():
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1, bias=False))  # shards of 3 and 2 rows, 1 and 0
    net.append(nn.Linear(1, 1).requires_grad_(False))
    fully_shard(net[0])
    fully_shard(net)
    return net


def gradients(net, step):
    torch.manual_seed(step)
    net.zero_grad()
    net(torch.randn(7, 3)).square().mean().backward()


def all_tensors(net, optimizer):
    """Return parameters and state, by position and name, with the kind of each."""
    found = {f"parameter {index}": parameter for index, parameter in enumerate(net.parameters())}
    for index, parameter in enumerate(net.parameters()):
        found |= {f"{name} of {index}": value for name, value in optimizer.state.get(parameter, {}).items()}
    return found


def compare(kind, **settings):
    """Train two copies in the same way; return whether all that they hold has the same types and is equal."""
    nets = [sharded_net() for _ in range(2)]
    whole, ours = (getattr(torch.optim, kind)(net.parameters(), lr=0.05, **settings) for net in nets)
    for step in range(4):
        for net in nets:
            gradients(net, step)
        whole.step()
        step_on_shards(ours, ours.step)
        if step == 1:  # as a run that is resumed
            ours.load_state_dict(copy.deepcopy(ours.state_dict()))
    expected, found = all_tensors(nets[0], whole), all_tensors(nets[1], ours)
    assert list(found) == list(expected)
    assert [group["params"] for group in ours.param_groups] == [list(nets[1].parameters())]
    for name, value in expected.items():
        assert type(found[name]) is type(value), name
        if isinstance(value, DTensor):
            assert found[name].placements == value.placements and found[name].shape == value.shape
            assert found[name].stride() == value.stride()
            value, found[name] = value.to_local(), found[name].to_local()
        assert value is None or torch.equal(found[name], value), name


def compare_all():
    for kind, settings in KINDS.items():
        compare(kind, **settings)


@pytest.mark.timeout(300)
def test_steps_on_shards_are_those_on_dtensors():
    run_ranks(compare_all, 2, timeout=240)


def follow_rprop():
    """Return how far a sharded net is from a whole one, by an optimizer that no DTensor can take."""
    torch.manual_seed(0)
    plain, net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1, bias=False), nn.Linear(1, 1)), sharded_net()
    plain[3].requires_grad_(False)
    optimizers = [torch.optim.Rprop(each.parameters(), lr=0.05) for each in (plain, net)]
    for step in range(4):
        for each in (plain, net):
            gradients(each, step)
        optimizers[0].step()
        step_on_shards(optimizers[1], optimizers[1].step)
    pairs = zip(plain.parameters(), net.parameters(), strict=True)
    return max(float((own - sharded.full_tensor()).detach().abs().max()) for own, sharded in pairs)


@pytest.mark.timeout(300)
def test_rprop_which_dtensors_cannot_take_steps_as_in_one_process():
    assert run_ranks(follow_rprop, 2, timeout=240)[0] < 1e-6


class Sees(torch.optim.SGD):
    """Another class, which may look at whole parameters."""


def look_at_steps():
    """Return the kinds of parameters that optimizers step on, by the reason."""
    seen = {}

    def look(reason, optimizer):
        def step():
            seen[reason] = {type(p).__name__ for group in optimizer.param_groups for p in group["params"]}

        step_on_shards(optimizer, step)

    net = sharded_net()
    gradients(net, 0)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    look("torch's", torch.optim.SGD(trained, lr=0.1))
    look("another class", Sees(trained, lr=0.1))
    look("not by element", torch.optim.Adafactor(trained, lr=0.1))
    watched = torch.optim.SGD(trained, lr=0.1)
    watched.register_step_pre_hook(lambda *_: None)
    look("hook", watched)
    timed = torch.optim.SGD(trained, lr=0.1)
    timed.register_step_pre_hook(Updates._before)
    look("a hook that takes times", timed)
    return seen


@pytest.mark.timeout(300)
def test_only_what_is_known_to_go_by_element_gets_shards():
    seen = run_ranks(look_at_steps, 2, timeout=240)[0]
    assert seen.pop("torch's") == seen.pop("a hook that takes times") == {"Tensor"}
    assert seen == {"another class": {"DTensor"}, "not by element": {"DTensor"}, "hook": {"DTensor"}}


def fail_in_a_step():
    """Return what an optimizer holds after a step that raised when it had begun."""
    net = sharded_net()
    optimizer = torch.optim.Adam([parameter for parameter in net.parameters() if parameter.requires_grad])
    gradients(net, 0)
    step_on_shards(optimizer, optimizer.step)

    def raise_in_step():
        optimizer.step()
        raise MemoryError

    with pytest.raises(MemoryError):
        step_on_shards(optimizer, raise_in_step)
    kinds = {type(parameter).__name__ for group in optimizer.param_groups for parameter in group["params"]}
    moments = {type(entry["exp_avg"]).__name__ for entry in optimizer.state.values()}
    return kinds, moments, len(optimizer.state)


@pytest.mark.timeout(300)
def test_an_optimizer_that_fails_keeps_its_dtensors():
    kinds, moments, number = run_ranks(fail_in_a_step, 2, timeout=240)[0]
    assert (kinds, moments) == ({"DTensor"}, {"DTensor"})
    assert number == 3
