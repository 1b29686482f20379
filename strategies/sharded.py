"""ShardedStrategy: the base of strategies under which each process keeps shards of the module's parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..common.errors import ConfigError, ModuleError
from .cluster.hardware import Hardware
from .distributed.collectives import Collectives
from .distributed.nested import map_tensors
from .distributed.process_group import ProcessSettings
from .launch.registries import follow_classes
from .module.deferred_init import DeferredInit
from .module.memory_estimate import MemoryShare
from .module.precision import Precision
from .parallel.equal_ranks import configure
from .parallel.mesh import Degrees, make_mesh
from .parallel.optimizer_probe import OptimizerProbe, check_can_be_dealt, check_can_be_sharded
from .parallel.replica_check import ReplicaCheck, ReplicaDifference
from .parallel.shard_update import note_use_of_shards, on_shards, step_on_shards
from .parallel.sharded_module import ShardedModule
from .parallel.sharding_policy import ShardingOptions, check_dimensions, check_gradients
from .pipeline.pipeline import Pipeline
from .pipeline.state import gather_all, here, marked, own_entries, whole_of_stages, without_elsewhere
from .pipeline.timeline import WindowRecorder
from .state.dtensor import clip_by_norm, gather_whole, is_dtensor, local_shard, multiply_all, shard_like
from .state.random_shards import draw_whole
from .state.sendable import check_sendable, check_shardable
from .state.shards import Holders
from .state.shared_memory import check_unshared
from .state.tied_names import as_tied
from .strategy import ClipAlgorithm, Strategy
from .torch_internals import overflows_of
from .units.gradient_hooks import GradientHooks
from .units.whole_parameters import is_number


class ShardedStrategy(Strategy):
    """Train a `ShardedModule`; subclasses decide how ranks are laid out, and what happens before it is sharded.

    Args:
        options: see `ShardingOptions`.
        deferred_init: whether ``configure_model`` builds without allocating memory.
        settings: see `ProcessSettings`.
    """

    uses_processes: ClassVar[bool] = True
    uses_many_devices: ClassVar[bool] = True
    forward_is_collective: ClassVar[bool] = True
    supports_inference_mode: ClassVar[bool] = False
    supports_restarts: bool = True

    _axes: ClassVar[Collection[str]] = ()
    """The axes that the mesh has even if their size is 1."""

    def __init__(self, options: ShardingOptions, *, deferred_init: bool, **settings: Unpack[ProcessSettings]) -> None:
        super().__init__(**settings)
        self.options = options
        self.deferred_init = deferred_init
        self.degrees = Degrees()
        """The degrees of parallelism; known after `validate`."""
        self._mesh: Any = None
        self._sharded: ShardedModule | None = None
        self._gradient_hooks: GradientHooks | None = None
        self._pipeline: Pipeline | None = None
        self._deferred = DeferredInit()
        self._holders = Holders()
        self._plain_only: set[int] = set()
        """The ids of optimizers whose operations fail on DTensors, and that update each element by itself."""

    @abstractmethod
    def _find_degrees(self) -> Degrees:
        """Return the degrees of parallelism of all ranks."""

    # --- before any process is started -------------------------------------------------------------------------------

    def validate(self, hardware: Hardware, precision: Precision) -> None:
        super().validate(hardware, precision)
        self.degrees = self._find_degrees()
        self.has_stages = self.degrees.pp > 1
        self.options.validate(self.degrees)

    def validate_module(self, module: nn.Module, *, trains: bool = True) -> None:
        if self.degrees.world_size > 1:
            self._check_dimensions(module)
            check_gradients(module)
            check_sendable(module, self.name)
            check_shardable(module, self.name, self.hardware.device_type)
            check_unshared(module, self.name, with_buffers=True)

    def _check_dimensions(self, module: nn.Module) -> None:
        if self.degrees.tp > 1 or self.degrees.pp > 1:
            check_dimensions(module)

    @property
    def keeps_shards_on_host(self) -> bool:
        """Whether shards are kept on the CPU, away from the device."""
        return self.options.cpu_offload and self.hardware.device_type != "cpu"

    # --- in every process --------------------------------------------------------------------------------------------

    def connect(self, hardware: Hardware, precision: Precision) -> None:
        super().connect(hardware, precision)
        if self.ranks.group is not None and self._mesh is None:
            self.degrees = self._find_degrees()
            self._mesh = make_mesh(self.device.type, self.degrees, axes=self._axes)

    @property
    def mesh_axes(self) -> Mapping[str, int]:
        return self.degrees.axes

    @property
    def memory_share(self) -> MemoryShare:
        return MemoryShare(self._share, self._share, self._share)

    def _share(self, parameter: Tensor) -> float:
        if not is_dtensor(parameter):
            return 0.0 if parameter.is_meta else 1.0  # of another stage
        return len(self._holders.of(parameter)) / (self.world_size // self.degrees.pp)

    def init_context(self) -> AbstractContextManager[object]:
        self._deferred = DeferredInit()
        return self._deferred.recording() if self.deferred_init and self.ranks.group is not None else nullcontext()

    def setup_module(self, module: nn.Module, *, is_manual: bool = False) -> None:
        if self.ranks.group is None:
            super().setup_module(module, is_manual=is_manual)
            return
        is_own = self._sharded is not None and self._sharded.module is module
        if any(is_dtensor(p) for p in module.parameters()) or (is_own and all(map(is_number, module.parameters()))):
            if not is_own:
                raise ConfigError(
                    f"{type(module).__name__} is sharded already, by a strategy other than this {type(self).__name__}; "
                    "use the trainer that sharded it, or build a new module and load a checkpoint."
                )
            return  # for example, when it is evaluated after it was trained
        self._check_dimensions(module)  # with what configure_model has built
        check_sendable(module, self.name)
        check_shardable(module, self.name, self.device.type)
        check_unshared(module, self.name, with_buffers=True)
        self.module = module
        draw_whole()
        # also for an evaluation, since it may be trained next
        is_manual = is_manual or not getattr(module, "automatic_optimization", True)
        places, hooks = self._deferred.places(module), GradientHooks(module)  # before the conversion replaces tensors
        self.precision.convert_module(module)
        configure(module, self._mesh, self.device, self.ranks.all)
        self._cut(module)
        collectives, elsewhere, runs = self._sharded_parts()
        self._sharded = ShardedModule(
            module,
            self._mesh,
            collectives=collectives,
            data_collectives=self.ranks.data,
            device=self.device,
            precision=self.precision,
            options=self.options,
            is_manual=is_manual,
            elsewhere=elsewhere,
            runs=runs,
        )
        follow_classes(module)
        self._sharded.fill(self._deferred, places)
        hooks.attach(module, self._sharded.roots, is_manual=is_manual)
        self._gradient_hooks = hooks
        self._deferred = DeferredInit()

    def _cut(self, module: nn.Module) -> None:
        """Split layers over ranks before parameters are sharded, for a strategy that does so. Collective."""

    def _sharded_parts(self) -> tuple[Collectives, Collection[nn.Parameter], Callable[..., Any] | None]:
        """Return the ranks that shard this one's parameters, parameters held elsewhere, and what runs partial steps."""
        return self.ranks.all, (), None

    def setup_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        if self._sharded is None:
            return
        self._sharded.check_all_sharded()
        self.check_kinds(optimizers)
        for optimizer in optimizers:
            held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            foreign = [tuple(parameter.shape) for parameter in held if parameter not in self._sharded.parameters]
            if foreign:
                raise ModuleError(
                    f"{len(foreign)} of {len(held)} parameters of {type(optimizer).__name__} are not the module's, of "
                    f"shapes {foreign[:3]}: it was built before the module was sharded and would not train it; build "
                    "it in configure_optimizers from self.parameters()."
                )
            probe = OptimizerProbe(optimizer)
            if self._pipeline is not None:  # each stage has parameters of its own
                check_can_be_dealt(probe, self.name, self.ranks.all)
            steps_on_plain = check_can_be_sharded(probe, self.name, self.ranks.all)
            (self._plain_only.add if steps_on_plain else self._plain_only.discard)(id(optimizer))

    def check_kinds(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise a `ConfigError` for an optimizer that treats all parameters as one vector."""
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ConfigError(
                    f"strategy={self.name!r} cannot train with {type(optimizer).__name__}, which treats all parameters "
                    "as one vector; use another optimizer, or strategy='ddp'."
                )

    # --- for every micro-batch and step ------------------------------------------------------------------------------

    def run(self, step_name: str, *args: Any) -> Any:
        with self.forward_context:
            if self._sharded is None:
                return getattr(self.module, step_name)(*args)
            output = self._sharded.run(step_name, *args)
        if self._gradient_hooks is not None:
            self._gradient_hooks.link()
        return output

    def beside_idle(self, step_name: str, busy: Sequence[bool], lent: Any) -> AbstractContextManager[None]:
        assert self._sharded is not None
        return self._sharded.runs.beside_idle(step_name, busy, lent)

    def stand_by(self, step_name: str, busy: Sequence[bool], run: Callable[[Any], None]) -> None:
        assert self._sharded is not None
        if self.precision.uses_scaler:
            self.scaler.scale(torch.zeros((), device=self.device))  # without a loss, the update needs the scale, too
        self._sharded.stand_by(step_name, busy, run)
        if self._pipeline is not None and step_name == "training_step":
            self._pipeline.add_shared_gradients()

    def record_window(self) -> WindowRecorder:
        return super().record_window() if self._pipeline is None else self._pipeline.record_window()

    def set_grad_sync(self, enabled: bool) -> None:
        if self._sharded is not None:
            self._sharded.set_grad_sync(enabled)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with nullcontext() if self._sharded is None else self._sharded.runs.order.watching():
            super().backward(loss, *args, **kwargs)
        self.end_backward()

    def end_backward(self) -> None:
        if self._sharded is not None:
            self._sharded.runs.end_backward()

    def unscale(self, optimizer: Optimizer) -> None:
        is_done = not self.precision.uses_scaler or self._scaling.has_unscaled(optimizer)
        # torch's scaler takes no DTensors beside plain tensors
        has_whole = not is_done and self._sharded is not None and self._sharded.runs.whole is not None
        with on_shards(optimizer) if has_whole else nullcontext():
            super().unscale(optimizer)
        if not is_done and (has_whole or self.ranks.data is not self.ranks.all):
            # torch asks the ranks of the first gradient's mesh
            for overflow in overflows_of(self.scaler, optimizer, self.device):
                overflow.copy_(self.ranks.all.all_reduce(overflow, "max"))

    def scale_gradients(self, factor: Tensor | float) -> None:
        multiply_all([local_shard(p.grad) for p in self.module.parameters() if p.grad is not None], factor)

    def clip(self, optimizer: Optimizer, limit: float, algorithm: ClipAlgorithm) -> Tensor | None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients = [parameter.grad for parameter in parameters]
        if algorithm == "norm":
            copies = None if self._pipeline is None else self._pipeline.copies_of(parameters)
            return clip_by_norm(gradients, limit, self.ranks.all, self._holders, copies)
        if gradients:
            shards = [local_shard(gradient) for gradient in gradients]
            torch._foreach_clamp_min_(shards, -limit)
            torch._foreach_clamp_max_(shards, limit)
        return None

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> None:
        # a closure computes the gradients of DTensors, and torch's scaler reads them
        if id(optimizer) in self._plain_only:
            self.unscale(optimizer)
            with on_shards(optimizer):
                super().step(optimizer, closure)
        elif self._sharded is None or self.precision.uses_scaler or closure is not None:
            super().step(optimizer, closure)
        else:
            step_on_shards(optimizer, optimizer.step)

    def annotate(self, error: BaseException) -> None:
        if self.has_stages and "not have been used in the graph" in str(error):
            error.add_note(
                "A pipeline stage has only its own part of a step's graph, so a step cannot compute a derivative "
                "(torch.autograd.grad) through several stages; use dp_shard and tp instead of pp."
            )
        note_use_of_shards(error, vars(self).get("module"))

    # --- state -------------------------------------------------------------------------------------------------------

    def sync_replicas(self, *, only_compares: bool = False, with_buffers: bool = False) -> ReplicaDifference | None:
        if self._sharded is None:
            return None
        self._sharded.reshard()
        if not only_compares:
            self._sharded.runs.writes.agree()
            # a sharded buffer differs between ranks
            self.sync_buffers({name: b for name, b in self.module.named_buffers() if not is_dtensor(b)})
        return ReplicaCheck(self.module, self.ranks.all, self._ranks_of).compare(with_buffers=with_buffers)

    def _ranks_of(self, name: str, parameter: Tensor) -> Sequence[int]:
        """Return the ranks that hold the same part of a parameter, or a buffer, as this one."""
        ranks = self._holders.of(parameter) if is_dtensor(parameter) else self.ranks.peers.ranks
        if self._pipeline is None:
            return ranks
        places = self._pipeline.ranks_of.get(name, [self._pipeline.rank])
        return sorted({self.degrees.along(rank, ("pp",))[place] for rank in ranks for place in places})

    def sync_buffers(self, copies: Mapping[str, Tensor]) -> None:
        super().sync_buffers(copies)
        if self._pipeline is not None:
            self._pipeline.sync_buffers(copies)

    def model_state(self) -> dict[str, Any]:
        if self._sharded is not None:
            self._sharded.reshard()
            self._sharded.check_all_sharded()
        state = super().model_state()
        return state if self._pipeline is None else marked(self._pipeline, state)

    def full_model_state(self) -> dict[str, Any]:
        if self._pipeline is not None and self._sharded is not None:
            self._sharded.reshard()
            state = gather_all(self._pipeline, self.ranks.all, is_kept=self.local_rank == 0)
        else:
            state = gather_whole(self.model_state(), is_kept=self.local_rank == 0)
        return as_tied(self.module, state)

    def whole_tensors(self, named: Mapping[str, nn.Parameter], *, gradients: bool = False) -> dict[str, Tensor]:
        if self._pipeline is None or self._sharded is None:
            return super().whole_tensors(named, gradients=gradients)
        self._sharded.reshard()
        return whole_of_stages(self._pipeline, {name: p.grad if gradients else p for name, p in named.items()})

    def load_model_state(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        own = self.module.state_dict()
        if self._pipeline is not None:
            state = without_elsewhere(self._pipeline, state)
        sharded = {name: shard_like(value, own.get(name)) for name, value in state.items()}
        super().load_model_state(sharded, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._sharded is not None:
            self._sharded.reshard()
        state = super().optimizer_state(optimizer)
        if self._pipeline is None:
            return state
        return own_entries(self._pipeline, state, self.ranks.peers)

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        own = dict(self.module.named_parameters())
        entries = state["state"] if self._pipeline is None else here(self._pipeline, state["state"])
        sharded = {
            name: map_tensors(partial(shard_like, like=own.get(name)), values) for name, values in entries.items()
        }
        super().load_optimizer_state(optimizer, {**state, "state": sharded})
