"""FSDPStrategy: parameters, gradients and optimizer state in shards, gathered part by part while a step runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .errors import ConfigError, ModuleError
from .hardware import Hardware
from .mesh import Degrees, Replicas, make_mesh
from .nested import iterate_tensors
from .precision import Precision
from .process_group import ProcessSettings
from .replica import copy_from_first
from .sharding_policy import CONTAINERS, Policy, Reshard, ShardingPlan, find_units, make_plan
from .shards import clip_by_norm, gather_whole, is_shard, local_part, shard_like, unsharded
from .step_caller import StepCaller
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
        mixed_precision: Any = None,
        **settings: Unpack[ProcessSettings],
    ) -> None:
        super().__init__(**settings)
        self.replicate = replicate
        self.policy = policy
        self.reshard_after_forward = reshard_after_forward
        self.forward_prefetch = forward_prefetch
        self.backward_prefetch = backward_prefetch
        self.sync_each_micro_batch = sync_each_micro_batch
        self.cpu_offload = cpu_offload
        self.mixed_precision = mixed_precision
        self.degrees = Degrees()
        self._mesh: Any = None
        self._root: Any = (
            None  # the sharded StepCaller; None where the module's children are roots, or nothing is sharded
        )
        self._units: list[Any] = []

    # --- before any process is started -------------------------------------------------------------------------------

    def check(self, hardware: Hardware, precision: Precision) -> None:
        super().check(hardware, precision)
        self.degrees = self._degrees()
        shards, reshard = self.degrees.dp_shard, self.reshard_after_forward
        if not isinstance(reshard, bool) and (reshard < 1 or shards % reshard):
            divisors = [d for d in range(2, shards) if shards % d == 0]
            raise ConfigError(
                f"reshard_after_forward={reshard} does not divide the {shards} shards of {self.degrees}; give True, "
                f"False{''.join(f' or {d}' for d in divisors)}."
            )
        for name in ("forward_prefetch", "backward_prefetch"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} is not possible; give a number of units, or 0.")

    def _degrees(self) -> Degrees:
        return Degrees.of(self.environment.world_size, self.environment.num_nodes, self.replicate)

    def plan(self, module: nn.Module) -> ShardingPlan:
        """Return what would be sharded where, in units of which size; print it. The module stays as it is."""
        names = find_units(module, self.policy)
        return make_plan(module, names, self.reshard_after_forward, str(self.degrees), self.degrees.dp_shard)

    # --- in every process --------------------------------------------------------------------------------------------

    def connect(self, hardware: Hardware, precision: Precision) -> None:
        super().connect(hardware, precision)
        if self.group is not None and self._mesh is None:
            self.degrees = self._degrees()
            self._mesh = make_mesh(self.device.type, self.degrees)

    def setup_module(self, module: nn.Module, *, is_manual: bool = False) -> None:
        if self.group is None:
            super().setup_module(module, is_manual=is_manual)
            return
        if any(is_shard(parameter) for parameter in module.parameters()):
            self._check_same(module)
            return
        self.module = module
        self.precision.convert_module(module)
        is_manual = is_manual or not getattr(module, "automatic_optimization", True)
        # what a manual step keeps would be outdated after its own updates
        self._reshards = True if is_manual else self.reshard_after_forward
        self._units = self._shard_units(module)
        self._caller = StepCaller(module, returns_tensors=True)
        if is_manual:  # gradients are computed inside the step, before a root around it could know its outputs
            self._shard_children(module)
        else:
            self._root = self._shard(self._caller, is_root=True)
        self._set_prefetch()
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        self._checked_steps: set[str] = set()

    def _check_same(self, module: nn.Module) -> None:
        """Check that a module which is sharded already was sharded here."""
        if getattr(self, "module", None) is not module:
            raise ConfigError(
                f"{type(module).__name__} is sharded already, by another strategy than this {type(self).__name__}; go "
                "on with the trainer that sharded it, or build it anew and load a checkpoint."
            )

    # --- sharding ----------------------------------------------------------------------------------------------------

    def _shard_units(self, module: nn.Module) -> list[Any]:
        """Shard the parts that are units, inner ones first, and return them in the module's order."""
        from torch.distributed.fsdp import FSDPModule

        configure = getattr(module, "configure_sharding", None)
        if configure is not None:
            configure(self._mesh)
        own = [part for part in module.modules() if isinstance(part, FSDPModule)]
        if not own:
            low = self.precision.autocast_dtype is not None or self.mixed_precision is not None
            names = find_units(module, self.policy, with_batch_norms=low)
            return [self._shard(module.get_submodule(name)) for name in reversed(names)][::-1]
        if own[0] is module or self.policy is not None:
            found = f"policy={self.policy!r:.60}" if self.policy is not None else "shards the module itself, too"
            raise ConfigError(
                f"{type(module).__name__}.configure_sharding shards {len(own)} parts, but {found}; let it shard parts "
                "of the module, whose rest the strategy shards, and leave policy out."
            )
        return list(own)

    def _shard(self, part: nn.Module, *, is_root: bool = False) -> Any:
        """Shard what a part has beyond the units inside of it. Collective: every rank calls it."""
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        self._make_equal(part)
        offload = CPUOffloadPolicy(pin_memory=self.device.type != "cpu") if self.cpu_offload else OffloadPolicy()
        return fully_shard(
            part,
            mesh=self._mesh,
            # None is torch's default for a root, which keeps what backward needs first
            reshard_after_forward=None if isinstance(part, StepCaller) and self._reshards else self._reshards,
            mp_policy=self._mixed_precision(part, is_root=is_root),
            offload_policy=offload,
        )

    def _make_equal(self, part: nn.Module) -> None:
        """Bring the tensors of a part that are not sharded yet to the device, with rank 0's values."""
        tensors = [tensor for tensor in chain(part.parameters(), part.buffers()) if not is_shard(tensor)]
        for tensor in tensors:
            tensor.data = tensor.data.to(self.device)
        copy_from_first(tensors, self.collectives)

    def _shard_children(self, module: nn.Module) -> None:
        """Shard each child of a module as a root of its own."""
        roots = list(_with_forward(module))
        inside = Counter(parameter for root in roots for parameter in set(root.parameters()))
        wrong = [name for name, parameter in module.named_parameters() if inside[parameter] != 1]
        if wrong:
            raise ModuleError(
                f"{', '.join(wrong[:5])} of {type(module).__name__} belongs to no child, or to several, and "
                f"automatic_optimization=False: strategy {self.name!r} gathers the parameters of a child when its "
                "forward is called; put them into one child module."
            )
        for root in roots:
            if any(not is_shard(parameter) for parameter in root.parameters()):
                self._units.append(self._shard(root, is_root=True))
            else:
                self._make_equal(root)

    def _mixed_precision(self, part: nn.Module, *, is_root: bool) -> Any:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        dtype = self.precision.autocast_dtype
        if self.mixed_precision is not None:
            policy = self.mixed_precision
        elif dtype is None or isinstance(part, nn.modules.batchnorm._BatchNorm):  # noqa: SLF001
            # statistics of a batch stay in float32
            return MixedPrecisionPolicy()
        else:
            policy = MixedPrecisionPolicy(
                param_dtype=dtype,
                reduce_dtype=torch.float32,
                output_dtype=torch.float32,
                # a batch holds targets as well as inputs, and autocast casts what it has to
                cast_forward_inputs=not is_root,
            )
        return policy if is_root else replace(policy, output_dtype=None)

    def _set_prefetch(self) -> None:
        for order, ahead, setter in (
            (self._units, self.forward_prefetch, "set_modules_to_forward_prefetch"),
            (self._units[::-1], self.backward_prefetch, "set_modules_to_backward_prefetch"),
        ):
            for index, unit in enumerate(order if ahead else ()):
                getattr(unit, setter)(order[index + 1 : index + 1 + ahead])

    def setup_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        if self.group is None:
            return
        self._check_all_sharded()
        for optimizer in optimizers:
            held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            foreign = [tuple(parameter.shape) for parameter in held if parameter not in self._names]
            if foreign:
                raise ModuleError(
                    f"{type(optimizer).__name__} holds {len(foreign)} of {len(held)} parameters that are not the "
                    f"module's, of shapes {foreign[:3]}: it was built before they were sharded, and would not train "
                    "them; build it in configure_optimizers from self.parameters()."
                )

    def _check_all_sharded(self) -> None:
        whole = unsharded(self.module)
        if whole:
            raise ModuleError(
                f"{', '.join(whole[:5])} of {type(self.module).__name__} came after the module was sharded, so that "
                "its gradients would stay on their rank; create parameters in __init__ or configure_model."
            )

    # --- for every micro-batch and step ------------------------------------------------------------------------------

    def run(self, step_name: str, *args: Any) -> Any:
        if self.group is None:
            with self.forward_context:
                return getattr(self.module, step_name)(*args)
        if step_name not in self._checked_steps:
            self._check_batch(step_name, args)
        with self.forward_context:
            if self._root is None:
                output = getattr(self.module, step_name)(*args)
            else:
                output = self._caller.rebuild(self._root(step_name, *args))
        if not torch.is_grad_enabled():
            self._reshard()  # or hooks between steps would see, and change, copies of the parameters
        return output

    def _check_batch(self, step_name: str, args: Sequence[Any]) -> None:
        self._checked_steps.add(step_name)
        for tensor in iterate_tensors(args):
            if is_shard(tensor) or tensor.device != self.device:
                found = f"a DTensor over {tensor.device_mesh}" if is_shard(tensor) else f"on {tensor.device}"  # type: ignore[attr-defined]
                raise ModuleError(
                    f"{step_name} got a tensor of shape {tuple(tensor.shape)} that is {found}, but rank {self.rank} of "
                    f"the mesh computes with plain tensors on {self.device}; let transfer_batch_to_device bring it "
                    "there."
                )

    def _reshard(self) -> None:
        for unit in self._units if self._root is None else (self._root, *self._units):
            unit.reshard()

    def accumulate(self, *, is_last: bool) -> None:
        for root in self._units if self._root is None else (self._root,):
            root.set_requires_gradient_sync(is_last or self.sync_each_micro_batch)
            root.set_is_last_backward(is_last)

    def scale_gradients(self, factor: Tensor | float) -> None:
        gradients = [local_part(p.grad) for p in self.module.parameters() if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def clip(self, optimizer: Optimizer, limit: float, algorithm: ClipAlgorithm) -> None:
        held = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if algorithm == "norm":
            clip_by_norm(held, limit, self.collectives, self.degrees.dp_replicate)
        else:
            parts = [local_part(gradient) for gradient in held]
            torch._foreach_clamp_min_(parts, -limit)
            torch._foreach_clamp_max_(parts, limit)

    # --- state -------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        if self.group is not None:
            self._reshard()
            copy_from_first(self.module.buffers(), self.collectives)

    def model_state(self) -> dict[str, Any]:
        if self.group is not None:
            self._reshard()
            self._check_all_sharded()
        return super().model_state()

    def full_model_state(self) -> dict[str, Any]:
        return gather_whole(self.model_state(), is_kept=self.local_rank == 0)

    def load_model_state(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        own = self.module.state_dict()
        super().load_model_state(
            {name: shard_like(value, own.get(name)) for name, value in state.items()}, strict=strict
        )

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self.group is not None:
            self._reshard()
        return super().optimizer_state(optimizer)

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        own = dict(self.module.named_parameters())
        sharded = {
            name: {key: shard_like(value, own.get(name)) for key, value in values.items()}
            for name, values in state["state"].items()
        }
        super().load_optimizer_state(optimizer, {**state, "state": sharded})


def _with_forward(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of a module; in place of a container without a forward, its children."""
    for child in module.children():
        if isinstance(child, CONTAINERS):
            yield from _with_forward(child)
        else:
            yield child
