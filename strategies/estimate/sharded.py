"""Estimate of sharded modules: units are gathered while they compute, and their gradients are scattered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..module.memory_estimate import MemoryShare, whole_share
from ..parallel.mesh import Degrees
from ..parallel.sharding_policy import Shape, ShardingOptions, ShardingPlan, Unit, largest_share
from ..state.dtensor import bytes_of
from .estimate import Activations, Estimate, all_reduced, bytes_exchanged, estimate_held
from .profile import Profile


def estimate_sharded(
    profile: Profile,
    plan: ShardingPlan,
    options: ShardingOptions,
    degrees: Degrees,
    activations: Activations,
    *,
    shapes: Mapping[Any, Shape] | None = None,
    is_on_host: bool = False,
) -> Estimate:
    """Return the estimate of a rank that keeps shards of a module's units.

    Args:
        profile: of one micro-batch.
        plan: the units.
        options: how long units stay gathered, and in which dtypes.
        degrees: the layout of the ranks.
        activations: of the rank.
        shapes: of the parameters that tensor parallelism cuts.
        is_on_host: whether the shards are in the node's memory instead of on the device.
    """
    num_shards, cut_shapes = degrees.dp_shard * degrees.cp, shapes or {}
    if profile.is_manual:  # updates would leave gathered parameters outdated
        plan = replace(plan, units=tuple(replace(unit, reshard=True) for unit in plan.units))

    parts: dict[Tensor, int] = {
        parameter: unit.num_parts
        for unit in plan.units
        if unit.num_parts > 1
        for parameter in profile.module.get_submodule(unit.name).parameters()
    }

    def fraction(parameter: Tensor) -> float:
        shape = cut_shapes.get(parameter, parameter.shape)
        return largest_share(parameter, shape, num_shards, parts.get(parameter, 1)) / max(1, bytes_of(parameter))

    dtypes = dtypes_of(profile, options)
    sizes = [_UnitSizes.of(unit, num_shards // unit.num_parts, *dtypes) for unit in plan.units]
    *units, root = sizes
    of_blocks = sum(sorted(size.computing for size in units)[-2:])
    of_blocks += sum(_kept_gathered(size, unit) for size, unit in zip(units, plan.units, strict=False))
    gathered = root.computing + of_blocks
    communication = max(_beside_gathered(units, root), _at_the_end(root) - gathered)
    is_trained = profile.gradient_bytes(whole_share) / max(1.0, profile.parameter_bytes(whole_share))
    accumulates = profile.num_micro_batches > 1 and not options.sync_each_micro_batch
    whole_gradients = sum(size.reducing for size in sizes) * is_trained if accumulates else 0.0
    estimate = estimate_held(
        profile,
        MemoryShare(fraction, fraction, fraction),
        activations,
        gathered=gathered,
        communication=communication,
        whole_gradients=whole_gradients,
        traffic=_estimate_traffic(profile, plan, options, degrees, sizes),
    )
    if not is_on_host:
        return estimate
    gradients = estimate.gradients - whole_gradients
    overlap = max(0.0, estimate.overlap - min(gradients, whole_gradients))
    shards = estimate.parameters + gradients + estimate.optimizer
    # shards come to the device in forward and backward, and gradients leave it
    sent = profile.num_micro_batches * 2 * estimate.parameters + gradients
    traffic = {**estimate.traffic, "host": sent}
    return replace(
        estimate,
        parameters=0.0,
        gradients=whole_gradients,
        optimizer=0.0,
        host=shards,
        overlap=overlap,
        traffic=traffic,
    )


class _UnitSizes:
    """The bytes of a whole unit, in the dtype in which it computes and in that in which its gradients are reduced."""

    def __init__(self, computing: float, reducing: float) -> None:
        self.computing, self.reducing = computing, reducing

    @classmethod
    def of(cls, unit: Unit, num_shards: int, computing: int | None, reducing: int | None) -> _UnitSizes:
        """Return the sizes of a unit, or of one of its parts, which is gathered from `num_shards` ranks.

        `computing` and `reducing` are bytes per element, None for unchanged.
        """
        padded = unit.bytes_a_rank * num_shards
        if "BatchNorm" in unit.kind or not padded:
            return cls(padded, padded)
        quantized = padded * unit.quantized_bytes / unit.num_bytes
        plain, number = padded - quantized, unit.num_parameters - unit.num_quantized
        element = (unit.num_bytes - unit.quantized_bytes) / max(1, number)
        in_compute = plain * (computing / element) if computing and number else plain
        return cls(quantized + in_compute, plain * (reducing / element) if reducing and number else in_compute)


def dtypes_of(profile: Profile, options: ShardingOptions) -> tuple[int | None, int | None]:
    """Return the bytes per element in computation and in reduction; None for those of the parameters."""
    given, autocast = options.mixed_precision, profile.precision.autocast_dtype
    if given is not None:
        computing, reducing = given.param_dtype, given.reduce_dtype
    else:
        computing, reducing = autocast, torch.float32 if autocast is not None else None
    return tuple(None if dtype is None else dtype.itemsize for dtype in (computing, reducing))  # type: ignore[return-value]


def _beside_gathered(units: list[_UnitSizes], root: _UnitSizes) -> float:
    """Return the bytes of other buffers while the largest unit computes its gradients.

    These are the parameters of the next unit, the gradients of one unit, those of two units in the dtype in which they
    are sent, and the gradients of the root so far, which computes outside of all units.
    """
    largest = max((size.computing + 2 * size.reducing for size in units), default=0.0)
    return max((size.computing for size in units), default=0.0) + largest + root.computing


def _at_the_end(root: _UnitSizes) -> float:
    """Return the bytes of the root's gradients, and of its parameters or what is sent, after those of all units."""
    return root.computing + max(root.computing, 2 * root.reducing)


def _kept_gathered(size: _UnitSizes, unit: Unit) -> float:
    """Return the bytes of a unit that stay gathered between forward and backward."""
    if unit.reshard is True:
        return 0.0
    return size.computing if unit.reshard is False else size.computing / unit.reshard


def _is_called(unit: Unit, profile: Profile) -> bool:
    """Return whether the step calls a unit; otherwise its parameters stay shards."""
    return not unit.name or any(f"{name}.".startswith(f"{unit.name}.") for name in profile.layers)


def _estimate_traffic(
    profile: Profile,
    plan: ShardingPlan,
    options: ShardingOptions,
    degrees: Degrees,
    sizes: list[_UnitSizes],
) -> dict[str, float]:
    num_micro_batches = profile.num_micro_batches * profile.num_backwards
    num_sums = num_micro_batches if options.sync_each_micro_batch or profile.is_manual else 1
    called = [(unit, size) for unit, size in zip(plan.units, sizes, strict=True) if _is_called(unit, profile)]
    is_trained = profile.gradient_bytes(whole_share) / max(1, sum(unit.num_bytes for unit, _ in called))
    sharded = replicated = 0.0
    for unit, size in called:
        num_shards = degrees.dp_shard * degrees.cp // unit.num_parts
        # a unit that stays gathered across some ranks is gathered again among these only
        again = 0.0 if unit.reshard is False else bytes_exchanged(size.computing, num_shards)
        if unit.reshard is not True and unit.reshard:
            again = bytes_exchanged(size.computing, unit.reshard)
        sharded += num_micro_batches * (bytes_exchanged(size.computing, num_shards) + again)
        sharded += num_sums * bytes_exchanged(size.reducing * is_trained, num_shards)
        replicated += num_sums * all_reduced(size.reducing * is_trained / num_shards, degrees.dp_replicate)
    return {"dp_shard": sharded, "dp_replicate": replicated}
