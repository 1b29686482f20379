"""Estimates of experts that are dealt over ranks, compared with what the ranks of a real step hold and send."""

from dataclasses import replace

import pytest
import torch
from as_rank import calm_down
from planned_modules import Classifier, hardware_of, loader, measure, misestimated, profile_of, settings_of
from torch import nn
from watched_step import WatchedStep

from echelon import Experts, ParallelStrategy, Trainer
from echelon.strategies.estimate.by_strategy import estimate_step
from echelon.testing import run_ranks


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(32), Experts(32, 48, 4, top_k=4)

    def forward(self, x):
        return x + self.experts(self.norm(x))


class Mixture(Classifier):
    """Blocks in which each token uses all experts, so that all ranks get as many, as in the formula."""

    inputs = (16, 32)

    def build(self):
        self.blocks, self.head = nn.Sequential(Tokens(), Tokens()), nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.blocks(x).mean(1))


class AsIfKnown(Mixture):
    """The same module for a profile without values: all experts get as many tokens."""

    def build(self):
        super().build()
        for block in self.blocks:
            block.experts.stack.forward = self.spread(block.experts.stack)

    def spread(self, stack):
        def forward(tokens, experts, weights):
            gate, up = torch.einsum("...w,ewh->...eh", tokens, stack.gate_up).chunk(2, -1)
            return torch.einsum("...eh,ehw,...e->...w", nn.functional.silu(gate) * up, stack.down, weights)

        return forward


def measured(num_ranks):
    calm_down()
    return measure(Mixture, ParallelStrategy(dp_shard=num_ranks, ep=2))


def test_what_ranks_hold_and_send_is_what_was_estimated():
    profile = profile_of(AsIfKnown)
    wrong = []
    for num_ranks in (2, 4):
        estimate = estimate_step(ParallelStrategy(dp_shard=num_ranks, ep=2), profile, hardware_of(num_ranks))
        found = run_ranks(measured, num_ranks, num_ranks)[0]
        # what autograd keeps differs between the two ways to compute; the formula is of parameters and of what is sent
        wrong += [line for line in misestimated(f"ep on {num_ranks}", estimate, found) if "activations" not in line]
    assert not wrong, "\n".join(wrong)


def measured_in_stages():
    calm_down()
    watched = WatchedStep()
    torch.manual_seed(0)
    strategy = ParallelStrategy(pp=2, dp_shard=2, ep=2)
    settings = settings_of(strategy=strategy, max_steps=4, callbacks=[watched], accumulate_grad_batches=2)
    Trainer(**settings).fit(Mixture(), loader(Mixture, num_batches=6))
    return watched.measured


def test_what_stages_with_experts_hold_and_send_is_what_was_estimated():
    profile = replace(profile_of(AsIfKnown), num_micro_batches=2)
    ranks = run_ranks(measured_in_stages, 4)
    most = max(ranks, key=lambda measured: measured["parameters"])
    estimate = estimate_step(ParallelStrategy(pp=2, dp_shard=2, ep=2), profile, hardware_of(4))
    for what in ("parameters", "optimizer"):
        assert getattr(estimate, what) == pytest.approx(most[what], rel=0.02), what
    assert estimate.sent == pytest.approx(most["traffic"], rel=0.05), estimate.traffic
