"""The strategy interface itself: its fields, and what Lightning users call on a strategy."""

import inspect

import pytest
import torch
from torch import nn

from echelon.strategies import Hardware, Precision, Strategy, place
from echelon.strategies.distributed.collectives import Collectives
from echelon.strategies.registry import STRATEGIES
from echelon.testing import run_ranks


def connected(name, devices=1):
    strategy, hardware = place(name, "cpu", devices, 1)
    precision = Precision()
    strategy.validate(hardware, precision)
    strategy.connect(hardware, precision)
    return strategy


@pytest.mark.parametrize("name", ["single", "dp", "ddp", "zero", "local_sgd", "fsdp", "elastic"])
def test_a_strategy_is_complete_after_connect_and_has_its_module_once_it_is_placed(name):
    strategy = connected(name)
    fields = set(Strategy.__annotations__) - {"name"}
    assert {field for field in fields if not hasattr(strategy, field)} == {"placed"}
    module = nn.Linear(2, 1)
    assert strategy.place(module).module is module
    assert strategy.module is module
    strategy.close()


@pytest.mark.parametrize("name", ["single", "dp", "ddp", "zero", "local_sgd", "fsdp", "tp", "device_map", "elastic"])
def test_where_no_gpu_is_named_that_of_the_strategy_is_meant(name, monkeypatch):
    """Streams, events and NCCL take the current device, which is cuda:0 on every rank until it is set."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    strategy, _ = place(name, "cpu", 1, 1)
    strategy.connect(Hardware("cuda", (3,)), Precision())
    assert chosen == [torch.device("cuda", 3)]


def test_a_strategy_that_nobody_runs_yet_is_one_process_on_the_cpu():
    strategy = STRATEGIES["ddp"]()
    assert (strategy.rank, strategy.world_size, strategy.root_device) == (0, 1, torch.device("cpu"))
    assert strategy.all_reduce({"loss": 2.0}) == {"loss": 2.0}
    assert strategy.precision.name == "32-true"


@pytest.mark.parametrize(
    "name",
    [
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "broadcast",
        "scatter",
        "gather",
        "all_gather_object",
        "send",
        "recv",
        "isend",
        "irecv",
        "barrier",
    ],
)
def test_a_collective_of_a_strategy_has_the_signature_and_the_docstring_of_that_of_collectives(name):
    ours, original = getattr(Strategy, name), getattr(Collectives, name)
    assert inspect.signature(ours) == inspect.signature(original)
    assert ours.__doc__ == original.__doc__


def lightnings(devices):
    strategy = connected("ddp", devices)
    rank = strategy.global_rank
    batch = strategy.batch_to_device({"x": torch.ones(2)})
    return {
        "first": strategy.is_global_zero,
        "mean": strategy.reduce(torch.tensor(float(rank))).item(),
        "sum": strategy.reduce(rank, reduce_op="sum"),
        "all": strategy.reduce_boolean_decision(rank == 0),
        "any": strategy.reduce_boolean_decision(rank == 0, all=False),
        "both": strategy.reduce_boolean_decision(True),
        "moved": batch["x"].device == strategy.root_device,
        "elsewhere": strategy.batch_to_device(torch.ones(2), torch.device("meta")).is_meta,
        "seen": strategy.broadcast(rank + 5, src=1),
    }


def test_what_lightnings_users_call_on_a_strategy_means_the_same_on_two_ranks():
    first, second = run_ranks(lightnings, 2, 2)
    same = {
        "mean": 0.5,
        "sum": 1,
        "all": False,
        "any": True,
        "both": True,
        "moved": True,
        "elsewhere": True,
        "seen": 6,
    }
    assert first == {"first": True, **same}
    assert second == {"first": False, **same}


def test_what_lightnings_users_call_on_a_strategy_changes_nothing_in_one_process():
    strategy = connected("single")
    assert strategy.is_global_zero
    assert strategy.reduce_boolean_decision(False, all=False) is False
    assert strategy.reduce(torch.tensor(3)).item() == 3
