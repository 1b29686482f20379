"""CutLayout: a run that cuts layers and sequences over ranks, and the estimate of one without pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import nn

from ..context_parallel.attention import ExchangeKind
from ..parallel.mesh import Degrees
from ..parallel.sharding_policy import ShardingOptions
from ..tensor_parallel.tensor_plan import TensorPlan
from .cut import CutActivations, sequence_exchange, summed_parameters
from .dealt_experts import sent_to_experts
from .estimate import Estimate, all_reduced
from .profile import Profile
from .sharded import estimate_sharded


@dataclass(frozen=True)
class CutLayout:
    """A run whose layers and sequences are cut over ranks, and whose parameters are sharded."""

    profile: Profile
    """Of one micro-batch."""
    degrees: Degrees
    options: ShardingOptions
    plan: TensorPlan | None
    """The cuts of the module's layers; None for none."""
    cp_exchange: ExchangeKind
    expert_parts: Mapping[str, int] = field(default_factory=dict)
    """The number of parts into which each layer of experts is dealt over ranks, by name."""

    @cached_property
    def shapes(self) -> Mapping[nn.Parameter, Sequence[int]]:
        """The shapes of the parameters that are cut."""
        return {} if self.plan is None else self.plan.cut_shapes(self.profile.module, self.degrees.tp)

    @cached_property
    def activations(self) -> CutActivations:
        """The activations of whole sequences that the cut layers leave on a rank."""
        return CutActivations(self.profile, self.plan, self.degrees.tp)

    @property
    def num_shards(self) -> int:
        """The number of ranks over which parameters are sharded."""
        return self.degrees.dp_shard * self.degrees.cp

    @property
    def gathered_pairs(self) -> float:
        """The bytes of the keys and values of one attention, if they are gathered."""
        is_gathered = self.degrees.cp > 1 and self.cp_exchange == "allgather"
        return self.profile.largest_attention_bytes / self.degrees.tp if is_gathered else 0.0

    @property
    def sent_for_attention(self) -> float:
        """What a rank with all blocks sends along cp in a step."""
        return self.profile.num_micro_batches * sequence_exchange(self.profile, self.degrees.cp, self.cp_exchange)


def estimate_layout(layout: CutLayout, *, is_on_host: bool) -> Estimate:
    """Return the estimate of a rank that has all blocks; `is_on_host`: its shards are in the node's memory."""
    profile, degrees, plan = layout.profile, layout.degrees, layout.plan
    estimate = estimate_sharded(
        profile,
        layout.options.plan(profile.module, profile.precision, degrees, layout.shapes, layout.expert_parts),
        layout.options,
        degrees,
        layout.activations.activations().times(1 / degrees.cp),
        shapes=layout.shapes,
        is_on_host=is_on_host,
    )
    sums = 0 if plan is None else all_reduced(summed_parameters(profile.module, plan), degrees.tp)
    between = 0.0 if plan is None else layout.activations.sent() / degrees.cp
    sent = {"tp": profile.num_micro_batches * (between + sums), "cp": layout.sent_for_attention}
    sent["ep"] = profile.num_micro_batches * sent_to_experts(profile, layout.expert_parts) / degrees.cp
    traffic = {**estimate.traffic, **{axis: number for axis, number in sent.items() if number}}
    return replace(estimate, communication=estimate.communication + layout.gathered_pairs, traffic=traffic)
