"""Estimates of a step whose loss needs no logits: the plan sees that they are not there."""

from other_modules import WithoutLogits
from planned_modules import BATCH, GPT, hardware_of, profile_of

from echelon.strategies import SingleDeviceStrategy
from echelon.strategies.estimate.by_strategy import estimate_step

LOGITS = 4 * BATCH * GPT.context * GPT.num_tokens
"""Their bytes, in float32."""
HEAD = 4 * GPT.width * GPT.num_tokens


def kept(kind):
    """Return the bytes that a step keeps from forward to backward, as estimated."""
    profile = profile_of(kind)
    return estimate_step(SingleDeviceStrategy(), profile, hardware_of(1)).by_kind["activations"]


def test_the_estimate_has_a_gradient_of_the_head_in_place_of_logits():
    saved = kept(GPT) - kept(WithoutLogits)
    of_hidden = 4 * BATCH * GPT.context * GPT.width
    assert 0.95 * (LOGITS - HEAD - of_hidden) <= saved <= 1.05 * LOGITS
