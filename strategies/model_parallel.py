"""ParallelStrategy: pipeline stages, layers and sequences are split over ranks, and parameters are sharded as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Unpack

from torch import Tensor, nn

from ..common.errors import ConfigError, ProcessError
from .cluster.hardware import Hardware
from .context_parallel.attention import ExchangeKind
from .context_parallel.context import ContextParallel, check_exchange
from .context_parallel.cut_steps import CutSteps
from .distributed.collectives import Collectives
from .distributed.process_group import ProcessSettings
from .experts.find_experts import check_capacity, check_experts, find_experts
from .module.precision import Precision
from .parallel.equal_ranks import overrides_hook
from .parallel.mesh import Degree, Degrees, check_degrees, make_mesh
from .parallel.sharding_policy import ParallelPlan, Policy, Reshard, ShardingOptions
from .pipeline.checks import check_module, check_number, check_pipeline, stage_table
from .pipeline.schedule import Schedule, ScheduleName, check_schedule
from .placed.cuts import Cuts
from .placed.shards import PlacedShards, Sharding
from .placed.stages import PlacedStages
from .sharded import ShardedStrategy
from .state.dtensor import is_dtensor
from .strategy import MicroBatches
from .tensor_parallel.find_plan import find_plan
from .tensor_parallel.tensor_plan import TensorPlan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_DATA: Final = ("dp_replicate", "dp_shard")
"""The axes along which ranks read different samples."""


class ParallelStrategy(ShardedStrategy):
    """Train with any combination of data, context, tensor and pipeline parallelism, taking one process's steps.

    The ranks that hold parts of one replica, which differ along pp, tp and cp, read the same samples. Parameters,
    gradients and optimizer state are sharded over dp_shard x cp with torch's ``fully_shard``.
    Source: Shoeybi et al., "Megatron-LM", 2019, and Korthikanti et al., "Reducing Activation Recomputation in Large
    Transformer Models", 2022; for pipelines see `Schedule`.

    Args:
        pp: the number of ranks of a pipeline, whose stages hold the module's blocks and pass micro-batches on. A
            micro-batch is one of ``accumulate_grad_batches``.
        schedule: the order in which stages work: ``"gpipe"``, ``"1f1b"``, ``"interleaved_1f1b"``, ``"looped_bfs"``,
            ``"interleaved_zero_bubble"``, ``"zbv_zero_bubble"`` or ``"dualpipe_v"``.
        virtual_stages: the number of pipeline stages per rank; by default 2 if the schedule allows several, else 1.
        dp_replicate: the number of replicas, between which only gradients are averaged. One degree may be ``"auto"``:
            what the others leave of world_size; ``"nodes"`` is the number of nodes.
        dp_shard: the number of ranks that read different samples and share one replica's parameters.
        ep: the number of ranks over which the experts of each layer are dealt; tokens travel to them. They are ranks of
            dp_shard, which read different samples, and all other parameters are sharded as without it.
        cp: the number of ranks over which each sequence is split.
        tp: the number of ranks over which layers are split; they are best kept within one node.
        tp_plan: how layers are split, by name; by default the module's attribute ``tp_plan``.
        sequence_parallel: shard activations along the sequence between split layers.
        loss_parallel: keep logits sharded by vocabulary up to the loss.
        cp_exchange: how attention reaches the keys of other ranks: ``"allgather"``, or ``"ulysses"``, which exchanges
            parts of the sequence for heads.
        cp_chunks: the chunks of each sequence that a rank has, an even number; more of them even out the work of
            attention inside of documents, and send more. For ``"allgather"``.
        sequence_dim: the sequence dimension of a batch's tensors, unless the module's ``sequence_dims`` names it.
        policy: see `FSDPStrategy`, also for the arguments that follow.
        settings: see `ProcessSettings`.

    Example::

        Trainer(strategy=ParallelStrategy(tp=2), devices=4)  # and dp_shard=2
        Trainer(strategy=ParallelStrategy(pp=2, schedule="1f1b", dp_shard=1), devices=2, accumulate_grad_batches=4)
    """

    name: ClassVar[str] = "tp"
    _axes: ClassVar[tuple[str, ...]] = ("tp",)

    def __init__(
        self,
        *,
        pp: Degree = 1,
        schedule: ScheduleName = "1f1b",
        virtual_stages: int | None = None,
        dp_replicate: Degree = 1,
        dp_shard: Degree = "auto",
        ep: int = 1,
        cp: Degree = 1,
        tp: Degree = 1,
        tp_plan: Mapping[str, Any] | None = None,
        sequence_parallel: bool = False,
        loss_parallel: bool = False,
        cp_exchange: ExchangeKind = "allgather",
        cp_chunks: int = 2,
        sequence_dim: int = 1,
        policy: Policy | None = None,
        reshard_after_forward: Reshard = True,
        forward_prefetch: int = 0,
        backward_prefetch: int = 0,
        sync_each_micro_batch: bool = False,
        cpu_offload: bool = False,
        deferred_init: bool = False,
        mixed_precision: Any = None,
        find_unused_parameters: bool = False,
        **settings: Unpack[ProcessSettings],
    ) -> None:
        options = ShardingOptions(
            policy=policy,
            reshard_after_forward=reshard_after_forward,
            forward_prefetch=forward_prefetch,
            backward_prefetch=backward_prefetch,
            sync_each_micro_batch=sync_each_micro_batch,
            cpu_offload=cpu_offload,
            mixed_precision=mixed_precision,
            find_unused_parameters=find_unused_parameters,
        )
        super().__init__(options, deferred_init=deferred_init, **settings)
        self._given: dict[str, Degree] = {
            "pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp,
        }  # fmt: skip
        check_degrees(self._given)
        _check_ep(ep, sequence_parallel=sequence_parallel)
        self.ep = ep
        self._expert_mesh: DeviceMesh | None = None
        check_schedule(schedule, virtual_stages)
        self.schedule, self.virtual_stages = schedule, virtual_stages
        self.can_try_steps = pp == 1
        self.name = "tp" if pp == 1 else "pp"  # type: ignore[misc]
        self.tp_plan = tp_plan
        self.sequence_parallel, self.loss_parallel = sequence_parallel, loss_parallel
        check_exchange(cp_exchange, cp_chunks)
        self.cp_exchange, self.cp_chunks, self.sequence_dim = cp_exchange, cp_chunks, sequence_dim
        self._sequences: CutSteps | None = None
        self._sequence_collectives: Collectives | None = None

    def __str__(self) -> str:
        """Return the degrees that were given, other than 1, and the order of stages; ``"auto"`` ones are left out."""
        degrees = {**self._given, "ep": self.ep}
        parts = [f"{axis}={degree}" for axis, degree in degrees.items() if degree not in (1, "auto")]
        parts += [self.schedule] * (self._given["pp"] != 1)
        return ", ".join(parts) or self.name

    def _find_degrees(self) -> Degrees:
        return Degrees.fit(self.ranks.environment.world_size, self.ranks.environment.num_nodes, self._given)

    @property
    def stage_schedule(self) -> Schedule:
        """The pipeline's schedule."""
        return Schedule.of(self.schedule, self.degrees.pp, self.virtual_stages)

    # --- before any process is started -------------------------------------------------------------------------------

    def validate(self, hardware: Hardware, precision: Precision) -> None:
        super().validate(hardware, precision)
        _check_ep_divides(self.ep, self.degrees.dp_shard)
        if self.degrees.pp > 1:
            check_pipeline(self.degrees.pp, cpu_offload=self.options.cpu_offload)

    def validate_module(
        self, module: nn.Module, *, trains: bool = True, micro_batches: MicroBatches = "unknown"
    ) -> None:
        super().validate_module(module, trains=trains, micro_batches=micro_batches)
        is_sharded = any(is_dtensor(p) for p in module.parameters())
        is_built = not overrides_hook(module, "configure_model") and not is_sharded
        if self.degrees.pp > 1 and not is_sharded:
            check_module(module, self.stage_schedule, is_built=is_built)
        if self.degrees.pp > 1 and micro_batches != "unknown":
            check_number(self.stage_schedule, None if micro_batches == "vary" else micro_batches)
        if self.degrees.tp > 1 and is_built and not overrides_hook(module, "configure_sharding"):
            self.find_tensor_plan(module).validate(module, self.degrees.tp)
        if self.degrees.cp > 1:
            check_capacity(module, self.degrees.cp)
        if self.ep > 1 and not is_sharded:
            if overrides_hook(module, "configure_sharding"):
                raise ConfigError(
                    f"ep={self.ep} deals experts before parameters are sharded, but {type(module).__name__} shards "
                    "them in its own configure_sharding; remove it, or leave ep out."
                )
            if is_built:
                check_experts(module, self.ep)

    def plan(self, module: nn.Module) -> ParallelPlan:
        """Return how the module would be split and sharded; print it for a table. The module is not changed.

        Until a trainer uses the strategy, ``"auto"`` and ``"nodes"`` count as 1.

        Raises:
            ConfigError: for layers that cannot be split.
        """
        degrees = self.degrees
        if degrees.world_size == 1:
            numbers = {axis: degree for axis, degree in self._given.items() if isinstance(degree, int)}
            degrees = Degrees(**numbers)
        table, shapes, stages = "", dict[nn.Parameter, Sequence[int]](), ""
        if degrees.pp > 1:
            stages = stage_table(module, Schedule.of(self.schedule, degrees.pp, self.virtual_stages))
        if degrees.tp > 1 and overrides_hook(module, "configure_sharding"):
            table = f"Layers are cut by {type(module).__name__}.configure_sharding."
        elif degrees.tp > 1:
            plan = self.find_tensor_plan(module)
            plan.validate(module, degrees.tp)
            table, shapes = plan.table(module, degrees.tp), plan.cut_shapes(module, degrees.tp)
        sharding = self.options.plan(module, self.precision, degrees, shapes, self.find_expert_parts(module))
        return ParallelPlan(table, sharding, stages)

    def annotate(self, error: BaseException) -> None:
        super().annotate(error)
        if self.degrees.pp == 1:
            return
        own = () if self.ranks.group is None else (self.rank,)
        for rank in error.ranks or own if isinstance(error, ProcessError) else own:
            stages = self._stages_of(rank)
            word = "stage" if len(stages) == 1 else "stages"
            error.add_note(
                f"Rank {rank} has {word} {' and '.join(map(str, stages))} of {self.stage_schedule.num_stages}."
            )

    def _stages_of(self, rank: int) -> Sequence[int]:
        return self.stage_schedule.stages_of(self.degrees.place(rank, ("pp",)))

    # --- in every process --------------------------------------------------------------------------------------------

    def connect(self, hardware: Hardware, precision: Precision) -> None:
        super().connect(hardware, precision)
        if self.ranks.group is None:
            self.degrees = Degrees.fit(1, 1, self._given)  # an elastic run may be down to a single process
        if self.ranks.group is None:
            return
        if self.ep > 1 and self._expert_mesh is None:
            _check_ep_divides(self.ep, self.degrees.dp_shard)
            self._expert_mesh = make_mesh(self.device.type, self.degrees, ep=self.ep)
        data = self._over(*_DATA)
        place, size = self.degrees.place(self.rank, _DATA), self.degrees.dp_replicate * self.degrees.dp_shard
        self.ranks = replace(self.ranks, data=data, loss=data, count=data, data_rank=place, data_size=size)
        if self.degrees.cp > 1:
            self._share_sequences()
        if self.degrees.pp > 1:
            peers, stages, count = self._over(*_DATA, "cp", "tp"), self._over("pp"), self._over("pp", *_DATA, "cp")
            has_loss = self.stage_schedule.num_stages - 1 in self._stages_of(self.rank)
            self.ranks = replace(self.ranks, peers=peers, stage=stages, count=count, has_loss=has_loss)

    def _over(self, *axes: str) -> Collectives:
        """Return the collectives of the ranks that differ from this one only along these axes. Collective."""
        return self.ranks.all.over(self.degrees.along(self.rank, axes))

    def _share_sequences(self) -> None:
        loss = self._over(*_DATA, "cp")
        self.ranks = replace(self.ranks, loss=loss, count=loss)
        ranks = self._sequence_collectives = self._over("cp")
        group, place = ranks.device_group, self.degrees.place(self.rank, ("cp",))
        kind: Any = {"exchange": self.cp_exchange, "num_chunks": self.cp_chunks, "sequence_dim": self.sequence_dim}
        context = ContextParallel(group, self.degrees.cp, place, **kind, device=self.device)
        self._sequences = CutSteps(context, self._over("pp", "cp"), self._over("dp_shard"))

    def positions(self, length: int) -> Tensor:
        if self._sequences is None:
            return super().positions(length)
        return self._sequences.context.positions(length, self.device)

    def _shard(self, module: nn.Module, sharding: Sharding) -> PlacedShards:
        if self.degrees.cp > 1:
            check_capacity(module, self.degrees.cp)  # which configure_model may have built
        cuts = Cuts(
            self.degrees,
            find_plan=self.find_tensor_plan,
            loss_parallel=self.loss_parallel,
            sequences=self._sequences,
            sequence_ranks=self._sequence_collectives,
            expert_mesh=self._expert_mesh,
        )
        if self.degrees.pp == 1:
            return PlacedShards(self.site, module, sharding, cuts)
        return PlacedStages(self.site, module, sharding, cuts, self.stage_schedule)

    def _place_again(self, placed: PlacedShards, *, is_manual: bool) -> None:
        placed.begin_run(self.site, self._sequences, is_manual=is_manual)

    def find_expert_parts(self, module: nn.Module) -> dict[str, int]:
        """Return the number of parts into which each layer of experts is dealt, by name; none without ep."""
        return dict.fromkeys(find_experts(module), self.ep) if self.ep > 1 else {}

    def find_tensor_plan(self, module: nn.Module) -> TensorPlan:
        """Return the cuts of the module's layers: those of `tp_plan`, or those that are found."""
        words = {"sequence_parallel": self.sequence_parallel, "loss_parallel": self.loss_parallel}
        return find_plan(module, self.tp_plan, **words)


def _check_ep(ep: object, *, sequence_parallel: bool) -> None:
    """Check what can be known of a number of ranks over which experts are dealt before that of processes is.

    Raises:
        ConfigError: for one that is no number, or that does not go with the other settings.
    """
    if isinstance(ep, bool) or not isinstance(ep, int) or ep < 1:
        raise ConfigError(f"ep must be a number of ranks >= 1, got {ep!r}; give one that divides dp_shard.")
    if ep > 1 and sequence_parallel:
        raise ConfigError(
            f"ep={ep} needs whole sequences between the layers that tp cuts, got sequence_parallel=True; leave one out."
        )


def _check_ep_divides(ep: int, dp_shard: int) -> None:
    if dp_shard % ep:
        divisors = [divisor for divisor in range(1, dp_shard + 1) if dp_shard % divisor == 0]
        raise ConfigError(
            f"ep={ep} must divide dp_shard={dp_shard}, whose ranks the experts are dealt over; give one of {divisors}, "
            "or another dp_shard."
        )
