"""Random streams where several ranks hold one replica belong to the data rank, in a run and in one that resumes it."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from as_rank import attempt, calm_down, double_trainer, world_size
from once import once
from shared_replicas import SharedReplicas
from sweep import IS_SWEEP
from torch import nn
from torch.utils.data import DataLoader, Dataset

from echelon import Callback, TrainModule, seed_everything
from echelon.testing import run_ranks
from echelon.trainer.checkpoint import load

NUM_STEPS, SAVED_AT = 8, 4


class Augmented(Dataset):
    """Samples with noise that is drawn when they are read."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.full((3,), index / 16, dtype=torch.float64) + 0.1 * torch.rand(3, dtype=torch.float64)


class Dropping(TrainModule):
    def __init__(self):
        super().__init__()
        seed_everything(3, verbose=False)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
        self.draws = []

    def training_step(self, batch, batch_idx):
        self.draws.append(torch.rand(()).item())
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class SaveOnce(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_step_end(self, trainer, module):
        if trainer.global_step == SAVED_AT:
            trainer.save_checkpoint(self.path)


def train(size, save_to=None, resume_from=None, batch_size=None):
    calm_down()
    module = Dropping()
    trainer = double_trainer(
        strategy=SharedReplicas(size) if world_size() > 1 else "single",
        max_steps=NUM_STEPS,
        num_sanity_val_steps=0,
        callbacks=[SaveOnce(save_to)] if save_to else [],
    )
    loader = DataLoader(Augmented(), batch_size=batch_size or 4 // max(world_size() // size, 1), shuffle=True)
    trainer.fit(module, loader, ckpt_path=resume_from)
    return [p.detach() for p in module.parameters()], module.draws


def assert_equal_in_replicas(results, size):
    for rank, (weights, draws) in enumerate(results):
        assert all(map(torch.equal, weights, results[0][0])), f"rank {rank} has other weights"
        assert draws == results[rank // size * size][1]
    firsts = [draws for _, draws in results[::size]]
    assert len({tuple(draws) for draws in firsts}) == len(firsts), "data ranks draw the same numbers"


SAME = [((4, 2), (2, 1)), ((2, 1), (4, 2)), ((2, 2), (1, 1))]
OTHER = [((2, 2), (4, 2)), ((4, 2), (4, 4))]
if IS_SWEEP:
    SAME += [((4, 2), (4, 2)), ((1, 1), (2, 2))]
    OTHER += [((2, 1), (3, 1)), ((2, 1), (2, 2))]
"""Layouts (ranks, those that hold a replica together) before and after, with as many data ranks and with others."""


def train_all(runs):
    """Return weights and random numbers of each run, or its error, by name."""
    return {name: attempt(partial(train, size, **options)) for name, (size, options) in runs.items()}


def result_of(ends, name):
    """Return what a run gave on each rank."""
    assert not isinstance(ends[0][name], str), ends[0][name]
    return [end[name] for end in ends]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return what a layout has saved, and how it ended; those of as many ranks are trained by one start of them."""
    folder = tmp_path_factory.mktemp("saved")
    layouts = {before for before, _ in (*SAME, *OTHER)}

    def run(num_ranks):
        own = {layout: (layout[1], {"save_to": path_of(layout)}) for layout in layouts if layout[0] == num_ranks}
        return run_ranks(train_all, num_ranks, own)

    def path_of(layout):
        return folder / f"{layout[0]}-{layout[1]}.ckpt"

    ends = once(run)
    return lambda layout: (path_of(layout), result_of(ends(layout[0]), layout))


@pytest.fixture(scope="module")
def resumed(saved):
    """Return how a layout goes on with what another has saved; those of as many ranks, by one start of them."""

    def run(num_ranks):
        own = {}
        for pairs, batch_size in ((SAME, None), (OTHER, 2)):
            for before, after in pairs:
                if after[0] == num_ranks:
                    own[before, after] = after[1], {"resume_from": saved(before)[0], "batch_size": batch_size}
        return run_ranks(train_all, num_ranks, own)

    ends = once(run)
    return lambda before, after: result_of(ends(after[0]), (before, after))


@pytest.mark.parametrize("layout", [(2, 2), (4, 2)])
def test_ranks_of_a_replica_draw_the_same_numbers_and_stay_equal_to_the_bit(layout, saved):
    path, results = saved(layout)
    assert_equal_in_replicas(results, layout[1])
    state, num_data_ranks = load(path), layout[0] // layout[1]
    assert len(state["rng"]) == len(state["data"]) == num_data_ranks
    assert json.loads((path / "manifest.json").read_text())


@pytest.mark.sweep
@pytest.mark.parametrize(("before", "after"), SAME)
def test_a_layout_with_as_many_data_ranks_goes_on_with_the_same_numbers(before, after, saved, resumed):
    _, results = saved(before)
    found = resumed(before, after)
    assert_equal_in_replicas(found, after[1])
    for rank in range(after[0]):
        weights, draws = results[rank // after[1] * before[1]]
        assert found[rank][1] == draws[SAVED_AT:]
        for own, expected in zip(found[rank][0], weights, strict=True):
            torch.testing.assert_close(own, expected, rtol=0, atol=1e-12)


@pytest.mark.sweep
@pytest.mark.parametrize(("before", "after"), OTHER)
def test_another_number_of_data_ranks_begins_streams_that_the_ranks_of_a_replica_share(before, after, saved, resumed):
    _, results = saved(before)
    found = resumed(before, after)
    assert_equal_in_replicas(found, after[1])
    assert found[0][1][0] == results[0][1][SAVED_AT]  # data rank 0 continues, with batches of another size
