"""FSDPStrategy: parameters, gradients and optimizer state in shards, gathered part by part while a step runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .cluster.hardware import Hardware
from .distributed.process_group import ProcessSettings
from .errors import ConfigError, ModuleError
from .module.deferred_init import DeferredInit
from .module.memory_estimate import MemoryShare
from .module.precision import Precision
from .parallel.mesh import Degrees, Replicas, make_mesh
from .parallel.replica import copy_from_first
from .parallel.sharded_module import ShardedModule, ShardingOptions
from .parallel.sharding_policy import Policy, Reshard, ShardingPlan
from .state.dtensor import clip_by_norm, gather_whole, is_dtensor, local_shard, shard_like
from .strategy import ClipAlgorithm, Strategy


class FSDPStrategy(Strategy):
    """Train with torch's ``fully_shard`` (FSDP2): each process keeps a share of parameters, gradients and optimizer.

    The parameters of a unit, a part of the module, are gathered before its forward and its backward and freed after.
    Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023, and Rajbhandari et
    al., "ZeRO", 2020.

    Args:
        replicate: in how many replicas the shards are kept; more than one is HSDP, whose gathering stays inside a
            replica. ``"nodes"`` makes one a node, or two on a single node.
        policy: which parts are units, see `sharding_policy.find_units`; by default the repeated blocks. A module that
            shards itself in ``configure_sharding`` needs none.
        reshard_after_forward: free parameters after forward and gather them again for backward (ZeRO-3); False keeps
            them (ZeRO-2); a number keeps them sharded among so many ranks.
        forward_prefetch: how many units ahead parameters are gathered in forward; by default as torch does.
        backward_prefetch: the same in backward, where torch gathers one ahead.
        sync_each_micro_batch: with several micro-batches a step, reduce gradients after each: more communication, but
            the memory of a shard; otherwise the gradients of the whole module wait on each rank for the last.
        cpu_offload: keep parameters, gradients and optimizer state on the CPU; the update is computed there.
        deferred_init: build what ``configure_model`` builds without memory, and fill the shards tensor by tensor, with
            the values that one process would have: for a module larger than the memory of one process.
        mixed_precision: torch's ``MixedPrecisionPolicy`` in place of the one that the trainer's precision means; its
            ``output_dtype`` holds for the outputs of steps.
        settings: those of the processes, see `ProcessSettings`.
    """

    name: ClassVar[str] = "fsdp"
    uses_processes: ClassVar[bool] = True
    uses_many_devices: ClassVar[bool] = True
    forward_is_collective: ClassVar[bool] = True
    supports_inference_mode: ClassVar[bool] = False

    def __init__(
        self,
        *,
        replicate: Replicas = 1,
        policy: Policy | None = None,
        reshard_after_forward: Reshard = True,
        forward_prefetch: int = 0,
        backward_prefetch: int = 0,
        sync_each_micro_batch: bool = False,
        cpu_offload: bool = False,
        deferred_init: bool = False,
        mixed_precision: Any = None,
        **settings: Unpack[ProcessSettings],
    ) -> None:
        super().__init__(**settings)
        self.replicate = replicate
        self.options = ShardingOptions(
            policy=policy,
            reshard_after_forward=reshard_after_forward,
            forward_prefetch=forward_prefetch,
            backward_prefetch=backward_prefetch,
            sync_each_micro_batch=sync_each_micro_batch,
            cpu_offload=cpu_offload,
            mixed_precision=mixed_precision,
        )
        self.deferred_init = deferred_init
        self.degrees = Degrees()
        """How the ranks are laid out; known as soon as a trainer has this strategy."""
        self._mesh: Any = None
        self._sharded: ShardedModule | None = None
        self._deferred = DeferredInit()

    # --- before any process is started -------------------------------------------------------------------------------

    def validate(self, hardware: Hardware, precision: Precision) -> None:
        super().validate(hardware, precision)
        self.degrees = self._degrees()
        self.options.validate(self.degrees)

    def _degrees(self) -> Degrees:
        return Degrees.of(self.environment.world_size, self.environment.num_nodes, self.replicate)

    def plan(self, module: nn.Module) -> ShardingPlan:
        """Return what would be sharded where, in units of which size; print it. The module stays as it is."""
        return self.options.plan(module, getattr(self, "precision", Precision()), self.degrees)

    # --- in every process --------------------------------------------------------------------------------------------

    def connect(self, hardware: Hardware, precision: Precision) -> None:
        super().connect(hardware, precision)
        if self.group is not None and self._mesh is None:
            self.degrees = self._degrees()
            self._mesh = make_mesh(self.device.type, self.degrees)

    @property
    def memory_share(self) -> MemoryShare:
        share = 1 / self.degrees.dp_shard
        return MemoryShare(share, share, share)

    def init_context(self) -> AbstractContextManager[object]:
        self._deferred = DeferredInit()
        return self._deferred.recording() if self.deferred_init and self.group is not None else nullcontext()

    def setup_module(self, module: nn.Module, *, is_manual: bool = False) -> None:
        if self.group is None:
            super().setup_module(module, is_manual=is_manual)
            return
        if any(is_dtensor(parameter) for parameter in module.parameters()):
            if self._sharded is None or self._sharded.module is not module:
                raise ConfigError(
                    f"{type(module).__name__} is sharded already, not by this {type(self).__name__}; go on with the "
                    "trainer that sharded it, or build it anew and load a checkpoint."
                )
            return  # evaluated after it was trained, say
        self.module = module
        places = self._deferred.places(module)  # those of parameters in their first dtype
        self.precision.convert_module(module)
        self._sharded = ShardedModule(
            module,
            self._mesh,
            collectives=self.collectives,
            device=self.device,
            precision=self.precision,
            options=self.options,
            # also where it is evaluated, for it may be trained next
            is_manual=is_manual or not getattr(module, "automatic_optimization", True),
        )
        self._sharded.fill(self._deferred, places)
        self._deferred = DeferredInit()

    def setup_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        if self._sharded is None:
            return
        self._sharded.check_all_sharded()
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ConfigError(
                    f"strategy={self.name!r} cannot train with {type(optimizer).__name__}, which takes all parameters "
                    "for one vector; use another optimizer, or strategy='ddp'."
                )
            held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            foreign = [tuple(parameter.shape) for parameter in held if parameter not in self._sharded.parameters]
            if foreign:
                raise ModuleError(
                    f"{type(optimizer).__name__} holds {len(foreign)} of {len(held)} parameters that are not the "
                    f"module's, of shapes {foreign[:3]}: it was built before they were sharded, and would not train "
                    "them; build it in configure_optimizers from self.parameters()."
                )

    # --- for every micro-batch and step ------------------------------------------------------------------------------

    def run(self, step_name: str, *args: Any) -> Any:
        with self.forward_context:
            if self._sharded is None:
                return getattr(self.module, step_name)(*args)
            return self._sharded.run(step_name, *args)

    def set_grad_sync(self, enabled: bool) -> None:
        if self._sharded is not None:
            self._sharded.set_grad_sync(enabled)

    def scale_gradients(self, factor: Tensor | float) -> None:
        gradients = [local_shard(p.grad) for p in self.module.parameters() if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def clip(self, optimizer: Optimizer, limit: float, algorithm: ClipAlgorithm) -> None:
        held = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        parts = [local_shard(gradient) for gradient in held]
        if algorithm == "norm":
            clip_by_norm(parts, limit, self.collectives, self.degrees.dp_replicate)
        elif parts:
            torch._foreach_clamp_min_(parts, -limit)
            torch._foreach_clamp_max_(parts, limit)

    def annotate(self, error: BaseException) -> None:
        if "mixed torch.Tensor and DTensor" in str(error):
            error.add_note(
                "A sharded parameter was used while only a shard of it was there. The parameters of a unit are whole "
                "while its forward runs, those of no unit while a step runs, or the module's own forward: call a layer "
                "there, and by its forward, or let policy make a larger part a unit (print strategy.plan(module))."
            )

    # --- state -------------------------------------------------------------------------------------------------------

    def sync_replicas(self) -> None:
        if self._sharded is not None:
            self._sharded.reshard()
            copy_from_first(self.module.buffers(), self.collectives)

    def model_state(self) -> dict[str, Any]:
        if self._sharded is not None:
            self._sharded.reshard()
            self._sharded.check_all_sharded()
        return super().model_state()

    def full_model_state(self) -> dict[str, Any]:
        return gather_whole(self.model_state(), is_kept=self.local_rank == 0)

    def load_model_state(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        own = self.module.state_dict()
        sharded = {name: shard_like(value, own.get(name)) for name, value in state.items()}
        super().load_model_state(sharded, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._sharded is not None:
            self._sharded.reshard()
        return super().optimizer_state(optimizer)

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        own = dict(self.module.named_parameters())
        sharded = {
            name: {key: shard_like(value, own.get(name)) for key, value in values.items()}
            for name, values in state["state"].items()
        }
        super().load_optimizer_state(optimizer, {**state, "state": sharded})
