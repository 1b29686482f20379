"""Estimate: the bytes that a rank holds by kind, and those that it sends by axis, in a step under a strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ..module.memory_estimate import MemoryShare
from .profile import CASTS, Profile

KINDS: Final = ("parameters", "gradients", "optimizer", "activations", "gathered", "communication", "workspace")
"""The kinds of memory, as fields of `Estimate`."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What the rank that needs the most memory holds and sends in an optimizer step, in bytes."""

    parameters: float
    gradients: float
    optimizer: float
    """The optimizer's state."""
    activations: float
    """What forward keeps for backward in one micro-batch, including the batch itself."""
    gathered: float = 0.0
    """Parameters gathered while their unit computes, where ranks hold shards."""
    communication: float = 0.0
    """Buffers for what is sent and received, besides the gradients."""
    workspace: float = 0.0
    """Buffers of the module, and what forward, backward and update need temporarily beyond what is kept."""
    host: float = 0.0
    """What is kept in the memory of the node instead, with ``cpu_offload`` or by servers; not in `total`."""
    overlap: float = 0.0
    """The part of the sum that is never allocated at the same time: activations are freed as gradients come."""
    idle: float = 0.0
    """The share of a step that ranks spend waiting for each other, if all stages of a pipeline are ideal."""
    traffic: Mapping[str, float] = field(default_factory=dict)
    """Bytes that the rank sends, by axis of the mesh; collectives count as rings, which send the least possible.

    For "servers", what the rank receives counts as well: they send it.
    """
    objection: str = ""
    """Why it is not proposed, though a user can choose it."""

    @property
    def total(self) -> float:
        """The peak memory."""
        return sum(self.by_kind.values()) - self.overlap

    @property
    def by_kind(self) -> dict[str, float]:
        """The largest memory of each kind."""
        return {kind: getattr(self, kind) for kind in KINDS}

    @property
    def sent(self) -> float:
        """The bytes that the rank sends, over all axes."""
        return sum(self.traffic.values())


@dataclass(frozen=True)
class Activations:
    """The tensors of a micro-batch that are neither parameters nor gradients nor state, in bytes."""

    kept: float
    peak: float
    most_with_gradients: float

    def times(self, factor: float) -> Activations:
        """Return the activations of a rank that has this fraction of each."""
        return Activations(self.kept * factor, self.peak * factor, self.most_with_gradients * factor)


def whole_activations(profile: Profile, *, has_casts: bool = True) -> Activations:
    """Return the activations of a rank that computes whole samples; `has_casts`: with autocast's copies."""
    memory, casts = profile.memory, frozenset((CASTS,))
    kept, peak = (sum(part.values()) - (0 if has_casts else part.get(casts, 0)) for part in (memory.kept, memory.peak))
    return Activations(kept, peak, memory.most_with_gradients)


def estimate_held(
    profile: Profile,
    share: MemoryShare,
    activations: Activations,
    *,
    gathered: float = 0.0,
    communication: float = 0.0,
    whole_gradients: float = 0.0,
    between_steps: float = 0.0,
    holds_gradients: bool = False,
    traffic: Mapping[str, float] | None = None,
) -> Estimate:
    """Return the estimate of a rank that holds a share of the training state.

    Args:
        profile: of one micro-batch.
        share: the rank's fraction of each parameter, its gradient and its state.
        activations: of the rank.
        gathered: see `Estimate`; where parameters are gathered, they are freed before the update, and so is
            `communication`.
        communication: see `Estimate`.
        whole_gradients: gradients of other ranks' shards that are held until they are reduced.
        between_steps: buffers that are allocated only while no activations are.
        holds_gradients: whether the memory of the gradients is never freed, as that of DDP's buckets.
        traffic: see `Estimate`.
    """
    parameters, gradients = profile.parameter_bytes(share.parameters), profile.gradient_bytes(share.gradients)
    optimizer, held_fraction = profile.state_bytes(share.optimizer), _update_fraction(profile, share)
    in_backward = max(0.0, activations.peak - activations.kept)
    update = profile.update_bytes * held_fraction
    # at the update, the activations have been freed
    without_activations = max(update, between_steps)
    workspace = profile.buffer_bytes + max(in_backward, without_activations - activations.kept)
    freed = gathered + communication if gathered else 0.0
    # shards of gradients come as whole ones are freed
    at_backward = max(gradients, whole_gradients) + activations.kept + in_backward + freed
    if profile.num_micro_batches == 1 and not (freed or whole_gradients or holds_gradients):
        # part of what the first micro-batch needs has been freed when gradients are complete
        at_backward = max(activations.most_with_gradients, gradients)
    most = max(at_backward, gradients + without_activations)
    separate = gradients + whole_gradients + freed + max(activations.kept + in_backward, without_activations)
    return Estimate(
        parameters=parameters,
        gradients=gradients + whole_gradients,
        optimizer=optimizer,
        activations=activations.kept,
        gathered=gathered,
        communication=communication,
        workspace=workspace,
        overlap=max(0.0, separate - most),
        traffic={axis: sent for axis, sent in (traffic or {}).items() if sent},
    )


def _update_fraction(profile: Profile, share: MemoryShare) -> float:
    """Return the fraction of the update that a rank computes."""
    whole = profile.state_bytes(lambda _: 1.0)
    return profile.state_bytes(share.optimizer) / whole if whole else 1.0


# --- what each rank of a ring sends; the bytes are those of the whole tensor ------------------------------------------


def all_reduced(num_bytes: float, num_ranks: int) -> float:
    """Return what a rank sends to sum a tensor over all ranks."""
    return 2 * bytes_exchanged(num_bytes, num_ranks)


def bytes_exchanged(num_bytes: float, num_ranks: int) -> float:
    """Return what a rank sends to gather a tensor, to scatter a sum, to broadcast or to exchange its parts."""
    return num_bytes * (num_ranks - 1) / num_ranks
