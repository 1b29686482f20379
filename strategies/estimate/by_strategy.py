"""Estimates by strategy: what a rank would hold and send in a step under each of them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial, singledispatch

from ...common.errors import ConfigError
from ..cluster.hardware import Hardware
from ..data_parallel import DataParallelStrategy
from ..ddp import ReplicaStrategy
from ..device_map import DeviceMapStrategy
from ..elastic import ForwardingStrategy
from ..local_sgd import LocalSGDStrategy
from ..model_parallel import ParallelStrategy
from ..module.memory_estimate import MemoryShare, whole_share
from ..parallel.equal_ranks import overrides_hook
from ..parallel.sharded_optimizer import check_one_by_one, deal_parameters
from ..parameter_server import ParameterServerStrategy
from ..placed.shards import check_kinds
from ..sharded import ShardedStrategy
from ..strategy import Strategy
from ..zero import ZeroStrategy
from .cut_layout import CutLayout, estimate_layout
from .estimate import Estimate, all_reduced, bytes_exchanged, estimate_held, whole_activations
from .profile import Profile
from .replicas import estimate_replica, replicas_traffic, summed_rows
from .served import ServedStep
from .sharded import estimate_sharded
from .stages import StageEstimates


def estimate_step(strategy: Strategy, profile: Profile, hardware: Hardware) -> Estimate:
    """Return what a rank would hold and send in a step on this hardware.

    A strategy of your own registers its formula with `estimate_by_kind`.

    Raises:
        ConfigError: if the strategy cannot train the module there, or has no estimate.
    """
    if isinstance(strategy, ForwardingStrategy):
        return estimate_step(strategy.inner, profile, hardware)
    strategy.validate(hardware, profile.precision)
    strategy.validate_module(profile.module, micro_batches=profile.num_micro_batches)
    return estimate_by_kind(strategy, profile)


@singledispatch
def estimate_by_kind(strategy: Strategy, profile: Profile) -> Estimate:
    """Return the estimate of a step under a strategy that has accepted the hardware and the module.

    Raises:
        ConfigError: for several processes, if no formula is registered: only a strategy knows what each of them holds.
    """
    world_size = strategy.ranks.environment.world_size
    if world_size > 1:
        raise ConfigError(
            f"strategy={strategy.name!r} has no estimate for {world_size} ranks; run a step with MemoryReport() "
            "instead."
        )
    return _estimate_alone(profile)


def _estimate_alone(profile: Profile) -> Estimate:
    """Return the estimate of a single process, which sends nothing."""
    return estimate_held(profile, MemoryShare(), whole_activations(profile))


@estimate_by_kind.register
def _(strategy: DeviceMapStrategy, profile: Profile) -> Estimate:
    raise ConfigError(
        f"strategy={strategy.name!r} has no estimate: it places {type(profile.module).__name__} by the memory that is "
        "free on devices when a run starts; run a step with callbacks=MemoryReport() instead."
    )


@estimate_by_kind.register
def _(strategy: DataParallelStrategy, profile: Profile) -> Estimate:
    num_devices = strategy.num_devices
    slice_ = whole_activations(profile).times(1 / num_devices)
    # the first device receives the gradients of the others, and sends each a replica
    gradients = profile.gradient_bytes(whole_share) if num_devices > 1 else 0.0
    sent = profile.num_micro_batches * (num_devices - 1) * profile.parameter_bytes(whole_share)
    return estimate_held(profile, MemoryShare(), slice_, communication=gradients, traffic={"devices": sent})


# --- replicas ---------------------------------------------------------------------------------------------------------


@estimate_by_kind.register
def _estimate_replicas(strategy: ReplicaStrategy, profile: Profile) -> Estimate:
    share = MemoryShare(gradients=summed_rows(profile, strategy.ranks.environment.world_size))
    return _estimate_replica(strategy, profile, share, _gradient_traffic(strategy, profile))


@estimate_by_kind.register
def _(strategy: LocalSGDStrategy, profile: Profile) -> Estimate:
    # for steps after the warm-up; with several periods, as if every average were over all ranks
    every = strategy.period if isinstance(strategy.period, int) else min(strategy.period)
    sent = all_reduced(profile.parameter_bytes(whole_share), strategy.ranks.environment.world_size) / every
    return _estimate_replica(strategy, profile, MemoryShare(), sent)


@estimate_by_kind.register
def _(strategy: ZeroStrategy, profile: Profile) -> Estimate:
    num_ranks = strategy.ranks.environment.world_size
    for optimizer in profile.optimizers:
        check_one_by_one(optimizer)
    by_optimizer = [deal_parameters(optimizer, num_ranks) for optimizer in profile.optimizers]
    dealt = [set().union(*of_rank) for of_rank in zip(*by_optimizer, strict=True)] or [set()]
    most = max(dealt, key=lambda own: sum(size.tensors for p, size in profile.state.items() if p in own))
    share = MemoryShare(gradients=summed_rows(profile, num_ranks), optimizer=lambda parameter: float(parameter in most))
    updated = sum(parameter.nbytes for own in dealt for parameter in own if parameter.requires_grad)
    sent = _gradient_traffic(strategy, profile) + bytes_exchanged(updated, num_ranks)
    # updated parameters are copied into a buffer to be sent
    return _estimate_replica(strategy, profile, share, sent, between_steps=updated)


def _gradient_traffic(strategy: ReplicaStrategy, profile: Profile) -> float:
    """Return the bytes that a rank sends to average gradients and, if enabled, to broadcast rank 0's buffers."""
    return replicas_traffic(
        profile,
        strategy.ranks.environment.world_size,
        compressed=strategy.options.compressed_fraction,
        broadcasts=strategy.options.broadcast_buffers,
    )


def _estimate_replica(
    strategy: ReplicaStrategy, profile: Profile, share: MemoryShare, sent: float, *, between_steps: float = 0.0
) -> Estimate:
    if strategy.ranks.environment.world_size == 1:
        return estimate_held(profile, share, whole_activations(profile))
    are_views = strategy.options.gradient_as_bucket_view
    return estimate_replica(profile, share, sent, are_views=are_views, between_steps=between_steps)


# --- shards -----------------------------------------------------------------------------------------------------------


@estimate_by_kind.register
def _estimate_shards(strategy: ShardedStrategy, profile: Profile) -> Estimate:
    degrees, options = strategy.degrees, strategy.options
    if degrees.world_size == 1:
        return _estimate_alone(profile)
    check_kinds(profile.optimizers, strategy.name)
    # a unit that computes in half precision is gathered in it, so autocast copies nothing
    activations = whole_activations(profile, has_casts=False)
    plan = options.plan(profile.module, strategy.precision, degrees)
    is_on_host = strategy.keeps_shards_on_host
    return estimate_sharded(profile, plan, options, degrees, activations, is_on_host=is_on_host)


@estimate_by_kind.register
def _(strategy: ParallelStrategy, profile: Profile) -> Estimate:
    degrees, module = strategy.degrees, profile.module
    if degrees.world_size == 1 or (degrees.tp > 1 and overrides_hook(module, "configure_sharding")):
        # how a module's configure_sharding splits it is unknown
        return _estimate_shards(strategy, profile)
    check_kinds(profile.optimizers, strategy.name)
    plan = strategy.find_tensor_plan(module) if degrees.tp > 1 else None
    parts = strategy.find_expert_parts(module)
    layout = CutLayout(profile, degrees, strategy.options, plan, strategy.cp_exchange, parts)
    if degrees.pp > 1:
        stages = StageEstimates(layout, strategy.stage_schedule).of_ranks()
        estimate = max(stages, key=lambda estimate: estimate.total)
    else:
        estimate = estimate_layout(layout, is_on_host=strategy.keeps_shards_on_host)
    if plan is None or not plan.is_one_by_one:
        return estimate
    return replace(
        estimate,
        objection=f"no layers that pass features to each other were found in {type(module).__name__}; tp={degrees.tp} "
        "would cut large ones one by one, and compute the rest on each rank. Choose it by hand, or give a tp_plan.",
    )


# --- parameter servers ------------------------------------------------------------------------------------------------


@estimate_by_kind.register
def _(strategy: ParameterServerStrategy, profile: Profile) -> Estimate:
    step = _served_step(strategy, profile)
    strategy.choices.check_number(strategy.num_servers, len(step.served))
    servers = [server.total for server in step.of_servers()]
    dense = partial(_estimate_replicas, strategy)
    trainer = step.of_trainer(dense, is_on_cpu=not strategy.launcher.uses_devices)
    return replace(trainer, host=max(servers) if strategy.choices.servers == "nodes" else sum(servers))


def estimate_servers(strategy: ParameterServerStrategy, profile: Profile, hardware: Hardware) -> list[Estimate]:
    """Return what each server would hold, send and receive in a step; `estimate_step` adds it to a trainer's ``host``.

    Raises:
        ConfigError: as `estimate_step` does.
    """
    estimate_step(strategy, profile, hardware)
    return _served_step(strategy, profile).of_servers()


def _served_step(strategy: ParameterServerStrategy, profile: Profile) -> ServedStep:
    return ServedStep(
        profile,
        serves_all=strategy.choices.serves_all,
        num_trainers=strategy.ranks.environment.world_size,
        num_servers=strategy.num_servers,
        is_async=strategy.choices.bound is not None,
    )
