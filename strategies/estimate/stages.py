"""Estimates of pipelines: each rank gathers its stages for a whole step, and keeps all micro-batches in flight."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..module.memory_estimate import MemoryShare
from ..parallel.sharding_policy import Shape, largest_share
from ..pipeline.partition import Partition, make_partition, stages_of_parameters
from ..pipeline.schedule import Schedule
from ..state.dtensor import bytes_of
from .cut_layout import CutLayout
from .dealt_experts import sent_to_experts
from .estimate import Activations, Estimate, all_reduced, bytes_exchanged, estimate_held
from .sharded import dtypes_of


class StageEstimates:
    """The estimates of the ranks of one pipeline, starting with the first stage's rank.

    Args:
        layout: how the ranks cut layers and sequences, and shard parameters.
        schedule: which rank has which stages, and in which order they run.
    """

    def __init__(self, layout: CutLayout, schedule: Schedule) -> None:
        profile = layout.profile
        self._layout, self._profile, self._schedule = layout, profile, schedule
        self._cut, self._degrees = layout.activations, layout.degrees
        self._shapes: Mapping[Any, Shape] = layout.shapes
        self._parts: Mapping[object, int] = {
            parameter: number
            for name, number in layout.expert_parts.items()
            for parameter in profile.module.get_submodule(name).parameters()
        }
        """The number of parts of the parameters that are dealt over ranks."""
        self._partition: Partition = make_partition(profile.module, schedule.num_stages)
        self._owners = {name: self._partition.owners(name)[-1] for name in self._partition.parts}
        self._holders = stages_of_parameters(profile.module, self._partition)
        self._computing, self._reducing = dtypes_of(profile, layout.options)
        by_stage = self._cut.by_stage(self._stage_of, schedule.num_stages)
        self._by_stage = [activations.times(1 / self._degrees.cp) for activations in by_stage]
        self._received = [self._input_bytes(stage) for stage in range(schedule.num_stages)]

    def of_ranks(self) -> list[Estimate]:
        """Return the estimate of each rank."""
        return [self._of_rank(rank) for rank in range(self._schedule.num_ranks)]

    def _of_rank(self, rank: int) -> Estimate:
        profile, stages = self._profile, self._schedule.stages_of(rank)
        own = {p for p in profile.parameters if set(self._holders[p]) & set(stages)}
        num_shards = self._layout.num_shards

        def fraction(parameter: Tensor) -> float:
            if parameter not in own:
                return 0.0
            shape = self._shapes.get(parameter, parameter.shape)
            share = largest_share(parameter, shape, num_shards, self._parts.get(parameter, 1))
            return share / max(1, bytes_of(parameter))

        computing, reducing, by_axis = self._gathered(own)
        activations = self._activations(rank)
        estimate = estimate_held(
            profile,
            MemoryShare(fraction, fraction, fraction),
            activations,
            gathered=computing,
            # of all micro-batches, until they are reduced; a stage starts once those of the step before are freed
            whole_gradients=reducing,
            communication=2.0 * max(self._received[stage] for stage in stages) + self._layout.gathered_pairs,
            traffic={
                "pp": self._sent(stages),
                **by_axis,
                "tp": profile.num_micro_batches
                * self._cut.sent(lambda name: self._stage_of(name) in stages)
                / self._degrees.cp,
                "cp": self._layout.sent_for_attention * self._share_of_blocks(stages),
                **self._sent_to_experts(stages),
            },
        )
        return replace(estimate, idle=self._schedule.idle_share(profile.num_micro_batches))

    def _gathered(self, own: Collection[Any]) -> tuple[float, float, dict[str, float]]:
        """Return the bytes of a rank's parameters once they are gathered, of their gradients, and what is sent."""
        profile, num_shards = self._profile, self._layout.num_shards
        totals, sent = [0.0, 0.0], {"dp_shard": 0.0, "dp_replicate": 0.0}
        for parameter in own:
            parts = self._parts.get(parameter, 1)
            number, shards = self._numel(parameter) / parts, num_shards // parts
            computing = number * (self._computing or parameter.element_size())
            reducing = number * (self._reducing or self._computing or parameter.element_size())
            reducing *= parameter in profile.trained
            totals = [totals[0] + computing, totals[1] + reducing]
            sent["dp_shard"] += bytes_exchanged(computing, shards) + bytes_exchanged(reducing, shards)
            sent["dp_replicate"] += all_reduced(reducing / shards, self._degrees.dp_replicate)
        return *totals, sent  # type: ignore[return-value]

    def _sent_to_experts(self, stages: Sequence[int]) -> dict[str, float]:
        layout = self._layout
        parts = {name: number for name, number in layout.expert_parts.items() if self._stage_of(name) in stages}
        sent = self._profile.num_micro_batches * sent_to_experts(self._profile, parts) / self._degrees.cp
        return {"ep": sent} if layout.expert_parts else {}

    def _share_of_blocks(self, stages: Sequence[int]) -> float:
        blocks = [part.name for part in self._partition.parts.values() if part.is_block]
        return sum(self._owners[name] in stages for name in blocks) / len(blocks) if blocks else 1.0

    def _numel(self, parameter: Tensor) -> int:
        number = 1
        for size in self._shapes.get(parameter, parameter.shape):
            number *= size
        return number

    # --- activations -------------------------------------------------------------------------------------------------

    def _stage_of(self, layer: str) -> int:
        """Return the last stage that has a layer; the first stage for a layer outside of all parts."""
        name = layer
        while name and name not in self._owners:
            name = name.rpartition(".")[0]
        return self._owners.get(name, 0)

    def _activations(self, rank: int) -> Activations:
        """Return the largest activations that are kept for all micro-batches in flight."""
        kept = {
            stage: self._by_stage[stage].kept + 2 * self._received[stage] for stage in self._schedule.stages_of(rank)
        }
        now = most = 0.0
        for action in self._schedule.actions(rank, self._profile.num_micro_batches):
            if action.kind == "F":
                now += kept[action.stage]
                most = max(most, now)
            elif action.kind == ("W" if self._schedule.splits_backward else "B"):
                now -= kept[action.stage]
        beyond = max(max(0.0, self._by_stage[stage].peak - self._by_stage[stage].kept) for stage in kept)
        return Activations(most, most + beyond, most + beyond)

    def _input_bytes(self, stage: int) -> float:
        """Return the bytes that a stage receives for a micro-batch: the input of its first block."""
        if stage == 0:
            return 0.0
        first = next(name for name in self._partition.stages[stage] if self._partition.parts[name].is_block)
        uses = [use for name, use in self._profile.layers.items() if f"{name}.".startswith(f"{first}.")]
        return uses[0].input_bytes / self._degrees.cp if uses else 0.0

    def _sent(self, stages: Sequence[int]) -> float:
        """Return the bytes that a rank sends: activations to the next stages, and gradients to the previous ones."""
        rank_of, last = self._schedule.rank_of, self._schedule.num_stages - 1
        one = 0.0
        for stage in stages:
            if stage < last and rank_of(stage + 1) != rank_of(stage):
                one += self._received[stage + 1]
            if stage and rank_of(stage - 1) != rank_of(stage):
                one += self._received[stage]
        return self._profile.num_micro_batches * one + self._sent_of_shared(stages)

    def _sent_of_shared(self, stages: Sequence[int]) -> float:
        """Return the bytes sent to sum the gradients of parameters that several ranks hold."""
        total = 0.0
        for parameter, holders in self._holders.items():
            ranks = sorted({self._schedule.rank_of(stage) for stage in holders})
            own = {self._schedule.rank_of(stage) for stage in stages}
            if len(ranks) > 1 and own & set(ranks):
                shard = self._numel(parameter) * parameter.element_size() / self._layout.num_shards
                total += shard * (len(ranks) - 1 if ranks[0] in own else 1)
        return total
