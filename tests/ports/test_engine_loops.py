"""Third-party loops take the same steps with an `Engine` as by hand, bitwise in one process."""

import inspect
from importlib import import_module

import pytest
import torch
from engine_loops import LOOPS

from echelon.strategies.state.dtensor import gather_whole
from echelon.testing import run_ranks


def by_hand(name, **values):
    """Return the losses of the loop that a program came with, and its weights."""
    original = import_module(f"port_{name}").original
    known = inspect.signature(original).parameters
    losses, model = original(**{key: value for key, value in values.items() if key in known})
    return losses, model.state_dict()


def loops_of_rank():
    """Run every loop in a process of two, in double precision and under each strategy."""
    torch.set_default_dtype(torch.float64)
    found = {}
    for name, loop in LOOPS.items():
        for strategy in ("ddp", "fsdp"):
            losses, model = loop(strategy)
            found[name, strategy] = losses, gather_whole(model.state_dict(), is_kept=True)
    return found


@pytest.fixture(scope="module")
def on_two_ranks():
    return run_ranks(loops_of_rank, 2, timeout=240)


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", LOOPS)
def test_one_process_takes_the_steps_of_the_loop_to_the_bit(name):
    losses, weights = by_hand(name)
    found, model = LOOPS[name]()
    assert found == losses and len(set(losses)) == len(losses)
    assert list(model.state_dict()) == list(weights)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", LOOPS)
def test_two_processes_take_the_steps_of_the_loop(name, strategy, on_two_ranks, double):
    losses, weights = by_hand(name, ranks=2)
    for rank in on_two_ranks:
        found, state = rank[name, strategy]
        assert found == pytest.approx(losses, rel=1e-12, abs=0)
        for key, value in weights.items():
            # of statistics that no batch norm shares, rank 0's are kept
            if "running" not in key and "num_batches" not in key:
                assert torch.allclose(state[key], value, rtol=1e-12, atol=1e-12), key
