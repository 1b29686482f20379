"""Estimates of pipelines compared with real steps: the peak memory of the largest rank, and what it sends."""

from dataclasses import replace

import pytest
import torch
from as_rank import calm_down
from planned_modules import GPT, hardware_of, loader, profile_of, settings_of
from watched_step import WatchedStep

from echelon import Trainer
from echelon.strategies import ParallelStrategy
from echelon.strategies.estimate.by_strategy import estimate_step
from echelon.testing import run_ranks

NUM_MICRO_BATCHES = 4
DEGREES = {2: ({"pp": 2}, {"pp": 2, "schedule": "gpipe"}), 4: ({"pp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "cp": 2})}


def measured_on_ranks(world_size):
    calm_down()
    answers = []
    for degrees in DEGREES[world_size]:
        watched = WatchedStep()
        torch.manual_seed(0)
        settings = settings_of(strategy=ParallelStrategy(**degrees), max_steps=4, callbacks=[watched])
        trainer = Trainer(**settings, accumulate_grad_batches=NUM_MICRO_BATCHES)
        trainer.fit(GPT(), loader(GPT, num_batches=3 * NUM_MICRO_BATCHES))
        answers.append(watched.measured)
    return answers


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.only_in_sweep)])
def test_what_stages_hold_and_send_is_what_was_estimated(world_size):
    ranks = run_ranks(measured_on_ranks, world_size, world_size)
    profile = replace(profile_of(GPT), num_micro_batches=NUM_MICRO_BATCHES)
    for index, degrees in enumerate(DEGREES[world_size]):
        most = max((rank[index] for rank in ranks), key=lambda measured: measured["total"])
        estimate = estimate_step(ParallelStrategy(**degrees), profile, hardware_of(world_size))
        assert estimate.parameters == pytest.approx(most["parameters"], rel=0.02), degrees
        assert estimate.optimizer == pytest.approx(most["optimizer"], rel=0.02), degrees
        assert estimate.total == pytest.approx(most["total"], rel=0.15), degrees
        assert estimate.sent == pytest.approx(most["traffic"], rel=0.05), degrees
        assert 0 < estimate.idle < 0.5
