"""Runs with one layout after another in the same processes are each as in one process."""

from itertools import pairwise

import pytest
from as_rank import double_trainer
from matrix import UNEVEN, Case, Staged, largest, samples
from torch.utils.data import DataLoader

from echelon import ParallelStrategy, seed_everything
from echelon.testing import run_ranks
from echelon.trainer.checkpoint import load

LAYOUTS = {
    "pp 4": {"pp": 4},
    "pp 2, tp 2": {"pp": 2, "tp": 2},
    "tp 4": {"tp": 4},
    "replicate 2, tp 2": {"dp_replicate": 2, "tp": 2},
    "fsdp 2, tp 2": {"dp_shard": 2, "tp": 2},
    "pp 2, replicate 2": {"pp": 2, "dp_replicate": 2},
    "fsdp 4": {"dp_shard": 4},
}
ORDER = [*LAYOUTS, "pp 4"]


def trained(path, strategy, share):
    """Train with clipped gradients, and save the weights on the way."""
    seed_everything(5, verbose=False)
    module = Staged(Case("adamw", clip=0.05))
    trainer = double_trainer(strategy=strategy, max_steps=2, accumulate_grad_batches=4, gradient_clip_val=0.05)
    trainer.fit(module, DataLoader(samples(UNEVEN, 1), 16 // 4 // share))
    trainer.save_checkpoint(path)


def in_turn(folder):
    """Train each layout in this process."""
    for number, degrees in enumerate(LAYOUTS[name] for name in ORDER):
        share = degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1)
        trained(folder / str(number), ParallelStrategy(**degrees), share)


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """Return what the checkpoints of one process and of each layout hold."""
    folder = tmp_path_factory.mktemp("in_turn")
    trained(folder / "one", "single", 1)
    run_ranks(in_turn, 4, folder)
    return [load(folder / name) for name in ("one", *map(str, range(len(ORDER))))]


def moments(state):
    """Return the tensors of an optimizer, by the parameter and their own name."""
    of_all = state["optimizers"][0]["state"].items()
    return {f"{name}, {key}": value for name, of_one in of_all for key, value in of_one.items()}


@pytest.mark.only_in_sweep
@pytest.mark.parametrize(("number", "which"), [*enumerate(f"{a}, then {b}" for a, b in pairwise(["one", *ORDER]))])
def test_a_layout_after_another_is_as_one_process(states, number, which):
    expected, found = states[0], states[number + 1]
    assert largest(found["model"], expected["model"]) < 1e-12, which
    assert len(moments(expected)) > 10
    assert largest(moments(found), moments(expected)) < 1e-12, which
