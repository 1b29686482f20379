"""Estimate of replicas: each rank holds the whole module, and gradients are averaged in DDP's buckets."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from ..module.memory_estimate import MemoryShare, Share, whole_share
from .estimate import Estimate, all_reduced, bytes_exchanged, estimate_held, whole_activations
from .profile import Profile

_INDEX: Final = 8
"""The bytes of a row's index in a sparse gradient."""


def estimate_replica(
    profile: Profile, share: MemoryShare, sent: float, *, are_views: bool, between_steps: float = 0.0
) -> Estimate:
    """Return the estimate of one of several ranks with replicas.

    Args:
        profile: of one micro-batch.
        share: the rank's fraction of each parameter, its gradient and its state.
        sent: the bytes that the rank sends in a step.
        are_views: whether gradients are views of DDP's buckets.
        between_steps: buffers that are allocated only while no activations are.
    """
    gradients = profile.gradient_bytes(whole_share)
    unused = sum(parameter.nbytes for parameter in profile.unused)
    if profile.is_manual:  # averaged without buckets, by a copy of all gradients and its mean
        communication, between_steps = 0.0, max(2 * _bucket_bytes(profile), between_steps)
    else:
        communication = (0.0 if are_views else gradients) + unused
        # after the first step, DDP rebuilds its buckets in the order in which gradients arrived
        between_steps = max(gradients, between_steps)
    return estimate_held(
        profile,
        share,
        whole_activations(profile),
        communication=communication,
        between_steps=between_steps,
        holds_gradients=are_views and not profile.is_manual,
        traffic={"dp_replicate": sent},
    )


def replicas_traffic(profile: Profile, num_ranks: int, *, compressed: float, broadcasts: bool) -> float:
    """Return the bytes that a rank sends in a step to average gradients and to broadcast rank 0's buffers.

    Args:
        profile: of one micro-batch.
        num_ranks: the number of replicas.
        compressed: the fraction of the gradients that is sent.
        broadcasts: whether replicas get rank 0's buffers.
    """
    sparse = sum(profile.sparse_bytes(parameter) for parameter in profile.sparse if parameter in profile.trained)
    dense = all_reduced(_bucket_bytes(profile), num_ranks)
    if profile.is_manual:  # after each backward, without DDP
        return profile.num_backwards * dense
    # rows are gathered from all ranks; buffers are sent at a step's first micro-batch
    rows = (num_ranks - 1) * sparse
    buffers = bytes_exchanged(profile.buffer_bytes, num_ranks) if broadcasts else 0.0
    return profile.num_backwards * (dense * compressed + rows + buffers)


def summed_rows(profile: Profile, num_ranks: int) -> Share:
    """Return what each gradient is a multiple of after the ranks' gradients are added: sparse ones have all rows.

    Each row counts as different from the others, up to the size of the table.
    """

    def factor(parameter: Tensor) -> float:
        if parameter not in profile.sparse or not profile.sparse[parameter]:  # type: ignore[index]
            return 1.0
        one = profile.sparse_bytes(parameter)  # type: ignore[arg-type]
        return min(num_ranks * one, parameter.nbytes + _INDEX * len(parameter)) / one

    return factor


def _bucket_bytes(profile: Profile) -> float:
    """Return the bytes of the dense gradients that are sent, which are zeros for parameters that a step leaves out."""
    dense = [parameter for parameter in profile.trained if parameter not in profile.sparse]
    return float(sum(parameter.nbytes for parameter in [*dense, *profile.unused]))
