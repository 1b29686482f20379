"""ParallelStrategy: pipeline stages, layers and sequences are split over ranks, and parameters are sharded as well."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Final, Unpack

import torch
from torch import Tensor, nn

from ..common.errors import ConfigError
from .cluster.hardware import Hardware
from .context_parallel.attention import ExchangeKind
from .context_parallel.context import ContextParallel, check_exchange
from .context_parallel.cut_steps import CutSteps
from .distributed.collectives import Collectives
from .distributed.nested import map_tensors
from .distributed.process_group import ProcessSettings
from .module.precision import Precision
from .parallel.equal_ranks import make_equal, overrides
from .parallel.mesh import Degree, Degrees, check_degrees, in_stage
from .parallel.sharding_policy import ParallelPlan, Policy, Reshard, ShardingOptions
from .pipeline.checks import check_module, check_number, check_pipeline, stage_table
from .pipeline.partition import find_parts
from .pipeline.pipeline import Pipeline
from .pipeline.schedule import Schedule, ScheduleName, check_schedule
from .pipeline.spec import signature_of
from .pipeline.work import StepContext, WindowWork
from .sharded import ShardedStrategy
from .state.dtensor import gathered, is_dtensor
from .tensor_parallel.block_check import BlockCheck
from .tensor_parallel.cutting import check_cut, cut_module
from .tensor_parallel.find_plan import find_plan
from .tensor_parallel.loss import loss_context
from .tensor_parallel.tensor_plan import TensorPlan

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
        cp: the number of ranks over which each sequence is split.
        tp: the number of ranks over which layers are split; they are best kept within one node.
        tp_plan: how layers are split, by name; by default the module's attribute ``tp_plan``.
        sequence_parallel: shard activations along the sequence between split layers.
        loss_parallel: keep logits sharded by vocabulary up to the loss.
        cp_exchange: how attention reaches the keys of other ranks: ``"allgather"``, or ``"ulysses"``, which exchanges
            parts of the sequence for heads.
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
        cp: Degree = 1,
        tp: Degree = 1,
        tp_plan: Mapping[str, Any] | None = None,
        sequence_parallel: bool = False,
        loss_parallel: bool = False,
        cp_exchange: ExchangeKind = "allgather",
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
        check_schedule(schedule, virtual_stages)
        self.schedule, self.virtual_stages = schedule, virtual_stages
        self.can_try_steps = pp == 1
        self.name = "tp" if pp == 1 else "pp"  # type: ignore[misc]
        self.tp_plan = tp_plan
        self.sequence_parallel, self.loss_parallel = sequence_parallel, loss_parallel
        check_exchange(cp_exchange)
        self.cp_exchange, self.sequence_dim = cp_exchange, sequence_dim
        self._check: BlockCheck | None = None
        self._sequences: CutSteps | None = None
        self._has_run = False

    def _find_degrees(self) -> Degrees:
        return Degrees.fit(self.environment.world_size, self.environment.num_nodes, self._given)

    @property
    def stage_schedule(self) -> Schedule:
        """The pipeline's schedule."""
        return Schedule.of(self.schedule, self.degrees.pp, self.virtual_stages)

    # --- before any process is started -------------------------------------------------------------------------------

    def validate(self, hardware: Hardware, precision: Precision) -> None:
        super().validate(hardware, precision)
        if self.degrees.pp > 1:
            check_pipeline(self.degrees.pp, cpu_offload=self.options.cpu_offload)

    def validate_module(self, module: nn.Module, *, trains: bool = True) -> None:
        super().validate_module(module, trains=trains)
        is_sharded = any(is_dtensor(p) for p in module.parameters())
        is_built = not overrides(module, "configure_model") and not is_sharded
        if self.degrees.pp > 1 and not is_sharded:
            check_module(module, self.stage_schedule, is_built=is_built)
        if self.degrees.tp > 1 and is_built and not overrides(module, "configure_sharding"):
            self.find_tensor_plan(module).validate(module, self.degrees.tp)

    def validate_micro_batches(self, number: int) -> None:
        if self.degrees.pp > 1:
            check_number(self.stage_schedule, number)

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
        if degrees.tp > 1 and overrides(module, "configure_sharding"):
            table = f"Layers are cut by {type(module).__name__}.configure_sharding."
        elif degrees.tp > 1:
            plan = self.find_tensor_plan(module)
            plan.validate(module, degrees.tp)
            table, shapes = plan.table(module, degrees.tp), plan.cut_shapes(module, degrees.tp)
        return ParallelPlan(table, self.options.plan(module, self.precision, degrees, shapes), stages)

    def role_of(self, rank: int) -> str:
        if not self.has_stages:
            return super().role_of(rank)
        stages = self.stage_schedule.stages_of(self.degrees.place(rank, ("pp",)))
        word = "stage" if len(stages) == 1 else "stages"
        return f"{word} {' and '.join(map(str, stages))} of {self.stage_schedule.num_stages}"

    # --- in every process --------------------------------------------------------------------------------------------

    def connect(self, hardware: Hardware, precision: Precision) -> None:
        super().connect(hardware, precision)
        if self.ranks.group is None:
            self.degrees = Degrees.fit(1, 1, self._given)  # an elastic run may be down to a single process
        self.has_stages = self.degrees.pp > 1
        if self.ranks.group is None:
            return
        data = self._over(*_DATA)
        place, size = self.degrees.place(self.rank, _DATA), self.degrees.dp_replicate * self.degrees.dp_shard
        self.ranks = replace(self.ranks, data=data, loss=data, count=data, data_rank=place, data_size=size)
        if self.degrees.cp > 1:
            self._share_sequences()
        if self.degrees.pp > 1:
            peers, stages, count = self._over(*_DATA, "cp", "tp"), self._over("pp"), self._over("pp", *_DATA, "cp")
            self.ranks = replace(self.ranks, peers=peers, stage=stages, count=count)

    def _over(self, *axes: str) -> Collectives:
        """Return the collectives of the ranks that differ from this one only along these axes. Collective."""
        return self.ranks.all.over(self.degrees.along(self.rank, axes))

    def _share_sequences(self) -> None:
        loss = self._over(*_DATA, "cp")
        self.ranks = replace(self.ranks, loss=loss, count=loss)
        self._sequence_collectives = self._over("cp")
        group, place = self._sequence_collectives.device_group, self.degrees.place(self.rank, ("cp",))
        context = ContextParallel(
            group, self.degrees.cp, place, exchange=self.cp_exchange, sequence_dim=self.sequence_dim
        )
        self._sequences = CutSteps(context, self._over("pp", "cp"), self._over("dp_shard"))

    def positions(self, length: int) -> Tensor:
        if self._sequences is None:
            return super().positions(length)
        return self._sequences.context.positions(length, self.device)

    def setup_module(self, module: nn.Module, *, is_manual: bool = False) -> None:
        if self._sequences is not None and is_manual:
            raise ConfigError(
                f"cp={self.degrees.cp} needs a module with automatic_optimization=True, got {type(module).__name__} "
                "with False; return the loss, or use cp=1."
            )
        if self._sequences is not None:
            self._sequences.begin(module)
        if self._pipeline is not None:
            self._pipeline.first_steps.begin()
        self._has_run = False
        super().setup_module(module, is_manual=is_manual)

    def run(self, step_name: str, *args: Any) -> Any:
        pipeline = self._pipeline
        if pipeline is None or pipeline.staged.is_passing:
            return self._run_here(step_name, *args)
        self._check_sequences(step_name, args)
        signature, step = signature_of(step_name, args[0] if args else None), partial(self._run_here, step_name, *args)
        with self._compared([signature], 0, lambda _: step(), lambda: args):
            return pipeline.evaluate(signature, step)

    def run_window(self, work: WindowWork) -> None:
        assert self._pipeline is not None and self._sharded is not None
        arguments = partial(_arguments, work)
        if not self._has_run:
            check_number(self.stage_schedule, work.micro_batches_a_step)
        if self._sequences is not None:
            self._check_sequences("training_step", *arguments())
        if self.precision.uses_scaler:
            self.scaler.scale(torch.zeros((), device=self.device))  # stages without a loss need the scale, too
        self._pipeline.note_trained(self._sharded.parameters)
        with self._compared(work.signatures, work.position, work.forward_at, arguments):
            self._sharded.begin_window()
            if self._gradient_hooks is not None:
                self._gradient_hooks.link()
            self._pipeline.run_window(work)
        self._sharded.end_window()
        if not self._has_run:
            self._has_run = True
            self._sharded.check_all_sharded()
        self._pipeline.add_shared_gradients()

    def _compared(self, *steps: Any) -> AbstractContextManager[None]:
        """Compare steps through stages with whole ones, see `FirstSteps`, unless other ranks cannot take part now."""
        assert self._pipeline is not None and self._sharded is not None
        return nullcontext() if self._sharded.runs.has_idle else self._pipeline.first_steps.compared(*steps)

    def stand_by(self, step_name: str, busy: Sequence[bool], run: Callable[[Any], None]) -> None:
        super().stand_by(step_name, busy, run)
        if self._sequences is not None:
            self._sequences.skip_check(step_name)  # the busy ranks have made it

    def _run_here(self, step_name: str, *args: Any) -> Any:
        if self._sequences is None:
            return self._run_checked(step_name, *args)
        if self._pipeline is None:
            self._check_sequences(step_name, args)
        return self._sequences.run(step_name, self.module, args, self._run_checked)

    def _check_sequences(self, step_name: str, *steps: Sequence[Any]) -> None:
        """Compare steps with ones on whole sequences, if sequences are split, see `CutSteps`. Collective."""
        if self._sequences is not None and self._sharded is not None:
            run, has_idle = partial(self._run_to_compare, step_name), self._sharded.runs.has_idle
            self._sequences.check(step_name, self.module, steps, run, has_idle=has_idle)

    def _run_to_compare(self, step_name: str, *args: Any) -> Any:
        """Run a step with unsplit arguments, through stages if there are several, and without checks."""
        assert self._sharded is not None
        step, signature = partial(self._run_step, step_name, *args), signature_of(f"{step_name} to compare", args[0])
        with self._sharded.runs.writes.ignored():
            return step() if self._pipeline is None else self._pipeline.evaluate_here(signature, step)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        # activation checkpointing needs positions and attention again
        with nullcontext() if self._sequences is None else self._sequences.context.recomputing():
            super().backward(loss, *args, **kwargs)

    def annotate(self, error: BaseException) -> None:
        super().annotate(error)
        if self._pipeline is not None:
            self._pipeline.annotate(error)
        if self._sequences is not None:
            self._sequences.annotate(error)

    def _run_checked(self, step_name: str, *args: Any) -> Any:
        """Run a step; in the first training step, compare split layers with whole ones."""
        if self._check is None or step_name != "training_step":
            return self._run_step(step_name, *args)
        with self._check as check:
            output = self._run_step(step_name, *args)
        if check.is_complete:
            self._check = None
        return output

    def _run_step(self, step_name: str, *args: Any) -> Any:
        with loss_context() if self.loss_parallel else nullcontext():
            return map_tensors(gathered, super().run(step_name, *args))

    def _make_stages(self, module: nn.Module) -> None:
        if self.degrees.pp == 1:
            return
        check_module(module, self.stage_schedule, is_built=True)
        for part in (*(module.get_submodule(name) for name in find_parts(module)), module):
            # on the CPU, as other ranks will hold most of it
            make_equal(chain(part.parameters(), part.buffers()), torch.device("cpu"), self.ranks.all)
        self._deferred.generator = self.ranks.all.broadcast(self._deferred.generator).cpu()
        self._pipeline = Pipeline(module, self.stage_schedule, self.ranks.stage, self.device)

    def _sharded_parts(self) -> tuple[Collectives, Collection[nn.Parameter], Callable[..., Any] | None]:
        pipeline = self._pipeline
        if pipeline is None:
            return super()._sharded_parts()
        pipeline.start(self._around_stages())
        self.has_loss = pipeline.rank == pipeline.last_rank
        return self.ranks.peers, pipeline.elsewhere, pipeline.staged.run

    def _around_stages(self) -> StepContext:
        around = StepContext(
            evaluates_alone=self.degrees.dp_shard == 1,  # otherwise each evaluation gathers from data ranks
            has_cut_layers=self.degrees.tp > 1,
            comparing=lambda: nullcontext() if self._sharded is None else self._sharded.runs.writes.ignored(),
        )
        if self._sequences is None:
            return around
        begin = self._sequence_collectives.begin_all_reduce  # a rehearsal answers this one itself
        return around._replace(
            recomputing=self._sequences.context.recomputing,
            is_true_on_any=lambda flag: bool(begin([float(flag)], "max")()[0]),
            together=self._sequences.collectives,
        )

    def _cut(self, module: nn.Module) -> None:
        self._make_stages(module)
        if self.degrees.tp == 1:
            return
        if any(is_dtensor(parameter) for parameter in module.parameters()):  # its configure_sharding has split it
            check_cut(module, self.degrees.tp)
            return
        plan = self.find_tensor_plan(module)
        plan.validate(module, self.degrees.tp)
        if self._pipeline is not None:
            plan = plan.of_layers(self._pipeline.is_here, self._pipeline.ends)
        for name in plan.words:
            layer = module.get_submodule(name)
            make_equal(chain(layer.parameters(), layer.buffers()), self.device, self.ranks.peers)
        mesh = self._mesh["tp" if self._pipeline is None else in_stage("tp")]
        self._check = None if self.ranks.all.is_rehearsed else BlockCheck(module, plan, mesh)
        cut_module(module, plan, mesh)

    def find_tensor_plan(self, module: nn.Module) -> TensorPlan:
        """Return the cuts of the module's layers: those of `tp_plan`, or those that are found."""
        words = {"sequence_parallel": self.sequence_parallel, "loss_parallel": self.loss_parallel}
        return find_plan(module, self.tp_plan, **words)


def _arguments(work: WindowWork) -> list[Sequence[Any]]:
    return [work.arguments_at(index) for index in range(len(work.signatures))]
