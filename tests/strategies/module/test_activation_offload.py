"""Activations go to the CPU and come back during the computation, unchanged, with a bounded amount in flight."""

import gc

import pytest
import torch
from pretended_cuda import PretendedCuda, tensor_on
from torch import Tensor, nn

from echelon.strategies.module import activation_offload
from echelon.strategies.module.activation_offload import ActivationOffload, Lane

GPU = torch.device("cuda", 1)
SIZE = 4 * 4


@pytest.fixture
def cuda(monkeypatch):
    """Copies on side streams are made when somebody waits for them, and not before."""
    monkeypatch.setattr(activation_offload, "_IN_FLIGHT", 3 * SIZE)
    cuda = PretendedCuda(is_late=True).install(monkeypatch)
    cuda.set_device(GPU)
    return cuda


def kept(lane, number):
    return [lane.keep(tensor_on(1, torch.full((4,), float(index)))) for index in range(number)]


def whole(tensor):
    return tensor.as_subclass(Tensor).tolist()


def test_what_is_kept_comes_back_though_copies_are_late(cuda):
    lane = Lane(GPU)
    for _ in range(2):
        away = kept(lane, 8)
        for index in reversed(range(8)):
            assert whole(lane.fetch(away[index])) == [index] * 4
        assert whole(lane.fetch(away[2])) == [2] * 4  # a graph that is retained asks again
        del away


def test_memory_is_given_back_once_the_computation_waits_for_the_copy_and_only_so_much_is_on_its_way(cuda):
    lane = Lane(GPU)
    away = kept(lane, 8)
    assert [one.original is not None for one in away] == 5 * [False] + 3 * [True]
    assert [whole(one.host) for one in away[:5]] == [[index] * 4 for index in range(5)]
    assert cuda.log.count(("wait", 1, 1)) == 5
    assert cuda.log.count(("wait for stream", 1, 1)) == 8  # values are copied once they are computed


def test_a_tensor_above_the_bound_leaves_alone(cuda):
    lane = Lane(GPU)
    small, large = kept(lane, 1)[0], lane.keep(tensor_on(1, torch.ones(100)))
    assert small.original is None
    assert large.original is not None
    assert whole(lane.fetch(large)) == [1] * 100
    assert small.ahead is not None


def test_backward_takes_what_has_not_left_and_fetches_the_next_ones_ahead(cuda):
    lane = Lane(GPU)
    away = kept(lane, 8)
    last = away[-1].original
    before = len(cuda.log)
    assert lane.fetch(away[-1]) is last
    assert ("keep for", 1) in cuda.log[before:]  # its memory is not used again while it is copied
    assert [one.ahead is not None for one in away] == [False, False, True, True, True, False, False, False]
    assert cuda.log[before:].count(("wait for stream", 1, 1)) == 3  # their memory was used for something else
    lane.fetch(away[4])
    assert [one.ahead is not None for one in away[:5]] == [False, True, True, True, False]


def test_what_was_fetched_ahead_and_is_not_needed_keeps_its_memory_until_it_has_arrived(cuda):
    lane = Lane(GPU)
    away = kept(lane, 5)
    lane.fetch(away[-1])
    assert away[0].ahead is not None
    before = len(cuda.log)
    del away
    gc.collect()
    assert cuda.log[before:].count(("keep for", 1)) == 2
    away = kept(lane, 8)  # the room is free again
    lane.fetch(away[-1])
    assert away[2].ahead is not None


def test_what_is_on_its_way_when_training_ends_arrives(cuda):
    lane = Lane(GPU)
    away = kept(lane, 2)
    lane.close()
    assert [one.original for one in away] == [None, None]
    assert whole(lane.fetch(away[1])) == [1] * 4
    assert whole(lane.fetch(away[0])) == [0] * 4


def test_on_the_cpu_and_for_parameters_nothing_is_copied():
    offload, layer = ActivationOffload(), nn.Linear(3, 3)
    x = torch.randn(2, 3, requires_grad=True)
    gradients = []
    for hooks in (offload.hooks(), torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)):
        with hooks:
            loss = layer(x).tanh().square().sum()
        gradients.append(torch.autograd.grad(loss, [x, *layer.parameters()]))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*gradients, strict=True))
    assert offload._keep(layer.weight)[1] is layer.weight
    assert offload._lanes == {}
