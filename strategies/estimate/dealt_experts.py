"""Traffic of experts that are dealt over ranks: tokens travel to them, outputs return, and so do gradients."""

from __future__ import annotations

from collections.abc import Mapping

from ..experts.find_experts import experts_of_token
from .profile import Profile


def sent_to_experts(profile: Profile, parts: Mapping[str, int]) -> float:
    """Return the bytes that a rank sends for one micro-batch, if routers use all experts alike.

    Args:
        profile: of one micro-batch.
        parts: the number of parts into which each layer of experts is dealt, by name.
    """
    total = 0.0
    for name, number in parts.items():
        use = profile.layers.get(name)
        if use is None:
            continue
        # there and back in forward, again where activations are recomputed; in backward there and back once
        ways = 2 * use.num_calls + 2
        total += ways * experts_of_token(profile.module, name) * use.input_bytes * (number - 1) / number
    return total
