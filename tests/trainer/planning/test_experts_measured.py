"""Estimates of experts that are dealt over ranks, compared with what the ranks of a real step hold and send."""

from dataclasses import replace

import pytest
import torch
from as_rank import calm_down
from planned_modules import Classifier, hardware_of, loader, measure, misestimated, profile_of, settings_of
from sweep import IS_SWEEP
from torch import nn
from watched_step import WatchedStep

from echelon import Experts, ParallelStrategy, Trainer, TrainModule
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


def measured(num_ranks):
    calm_down()
    return measure(Mixture, ParallelStrategy(dp_shard=num_ranks, ep=2))


@pytest.mark.sweep
def test_what_ranks_hold_and_send_is_what_was_estimated():
    profile = profile_of(Mixture)
    wrong = []
    for num_ranks in (2, 4) if IS_SWEEP else (2,):
        estimate = estimate_step(ParallelStrategy(dp_shard=num_ranks, ep=2), profile, hardware_of(num_ranks))
        found = run_ranks(measured, num_ranks, num_ranks)[0]
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
    profile = replace(profile_of(Mixture), num_micro_batches=2)
    ranks = run_ranks(measured_in_stages, 4)
    most = max(ranks, key=lambda measured: measured["parameters"])
    estimate = estimate_step(ParallelStrategy(pp=2, dp_shard=2, ep=2), profile, hardware_of(4))
    for what in ("parameters", "optimizer"):
        assert getattr(estimate, what) == pytest.approx(most[what], rel=0.02), what
    assert estimate.sent == pytest.approx(most["traffic"], rel=0.05), estimate.traffic


class Words(TrainModule):
    """An unmodified model of transformers, whose experts loop over those that tokens have chosen."""

    def __init__(self):
        import transformers

        super().__init__()
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        config = transformers.MixtralConfig(
            **sizes, num_key_value_heads=2, vocab_size=24, num_local_experts=4, num_experts_per_tok=4
        )
        self.model = transformers.MixtralForCausalLM(config)
        self.model.set_experts_implementation("eager")

    @staticmethod
    def samples(number):
        return (torch.randint(24, (number, 8)),)

    def training_step(self, batch, batch_idx):
        return self.model(batch[0], labels=batch[0]).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def test_a_model_of_transformers_is_estimated_without_values():
    pytest.importorskip("transformers")
    profile = profile_of(Words)
    estimate = estimate_step(ParallelStrategy(dp_shard=2, ep=2), profile, hardware_of(2))
    tokens, width, float32, layers = 8 * 8, 16, 4, 2
    assert estimate.traffic["ep"] == 4 * 4 * tokens * width * float32 / 2 * layers  # the formula of docs/experts.md
    of_experts = 3 * 2 * 3 * 4 * tokens * 16 * 32 * layers  # forward and backward of three matrices, of four experts
    assert of_experts < profile.flops < 1.3 * of_experts  # and attention, routers and the head
