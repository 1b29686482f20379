"""ShardedModule: a module of which each rank holds shards, and the steps that gather them part by part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..distributed.collectives import Collectives
from ..distributed.nested import iterate_tensors
from ..errors import ConfigError, ModuleError
from ..module.blocks import CONTAINERS
from ..module.deferred_init import DeferredInit, Places
from ..module.precision import Precision
from ..state.dtensor import is_dtensor, local_shard, shard_like
from .mesh import Degrees
from .replica import copy_from_first
from .sharding_policy import Policy, Reshard, ShardingPlan, find_units, make_plan
from .step_caller import StepCaller

_NORMS: Final = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """What is sharded, how long it is gathered, and in which dtypes it is computed."""

    policy: Policy | None = None
    """Which parts are units, see `find_units`."""
    reshard_after_forward: Reshard = True
    """Whether parameters are freed after forward; or among how many ranks they are kept."""
    forward_prefetch: int = 0
    """How many units ahead parameters are gathered in forward."""
    backward_prefetch: int = 0
    """The same in backward."""
    sync_each_micro_batch: bool = False
    """Whether gradients meet after each micro-batch, or wait whole on each rank for the last of a step."""
    cpu_offload: bool = False
    """Whether parameters, gradients and optimizer state are on the CPU."""
    mixed_precision: Any = None
    """A ``MixedPrecisionPolicy`` of torch, in place of what the trainer's precision means."""

    def validate(self, degrees: Degrees) -> None:
        """Check what can be known before any process is started.

        Raises:
            ConfigError: for numbers that cannot be.
        """
        shards, reshard = degrees.dp_shard, self.reshard_after_forward
        if not isinstance(reshard, bool) and (reshard < 2 or shards % reshard):
            possible = [True, False, *(d for d in range(2, shards) if shards % d == 0)]
            raise ConfigError(
                f"reshard_after_forward={reshard} does not divide the {shards} shards of {degrees}; give one of "
                f"{', '.join(map(str, possible))}."
            )
        for name in ("forward_prefetch", "backward_prefetch"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} is not possible; give a number of units, or 0.")

    def find_units(self, module: nn.Module, precision: Precision) -> list[str]:
        """Return the names of the units of a module."""
        # statistics of a batch stay in float32
        with_batch_norms = self.mixed_precision is None and precision.autocast_dtype is not None
        return find_units(module, self.policy, with_batch_norms=with_batch_norms)

    def plan(self, module: nn.Module, precision: Precision, degrees: Degrees) -> ShardingPlan:
        """Return what would be sharded where."""
        units = self.find_units(module, precision)
        return make_plan(module, units, self.reshard_after_forward, str(degrees), degrees.dp_shard)


class ShardedModule:
    """This rank's shards of a module, which is sharded in place: units, then a root around the steps with the rest.

    In manual optimization each child is a root of its own, since gradients are computed inside the step. Collective:
    every rank makes one.

    Args:
        module: the user's module, equal on all ranks afterwards.
        mesh: a DeviceMesh with the axis ``dp_shard``, and maybe ``dp_replicate`` before it.
        collectives: those of all ranks.
        device: where this rank computes.
        precision: the trainer's.
        options: see `ShardingOptions`.
        is_manual: whether the module's step computes gradients and updates itself.

    Raises:
        ConfigError: for a policy that matches nothing, or that contradicts the module's ``configure_sharding``.
        ModuleError: for parameters that cannot be sharded.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Any,
        *,
        collectives: Collectives,
        device: torch.device,
        precision: Precision,
        options: ShardingOptions,
        is_manual: bool,
    ) -> None:
        self.module = module
        self._mesh, self._collectives, self._device = mesh, collectives, device
        self._precision, self._options = precision, options
        # what a manual step keeps would be outdated after its own updates
        self._reshards = True if is_manual else options.reshard_after_forward
        self._units = self._shard_units()
        self._caller = StepCaller(module, returns_tensors=True)
        self._roots = self._shard_children() if is_manual else [self._shard(self._caller, is_root=True)]
        self._is_manual = is_manual
        self._set_prefetch()
        if device.type == "cpu":
            _match_inputs_of_norms(module)
        self.parameters = _names(module)
        """The names of the sharded parameters."""
        self._checked_steps: set[str] = set()
        self._is_in_step, self._syncs = False, True
        if not is_manual:
            self._forward, module.forward = module.forward, self._call

    # --- sharding ----------------------------------------------------------------------------------------------------

    def _shard_units(self) -> list[Any]:
        """Shard the parts that are units, inner ones first, and return them in the module's order."""
        from torch.distributed.fsdp import FSDPModule

        module, policy = self.module, self._options.policy
        configure = getattr(module, "configure_sharding", None)
        if configure is not None:
            configure(self._mesh)
        own = [part for part in module.modules() if isinstance(part, FSDPModule)]
        if not own:
            names = self._options.find_units(module, self._precision)
            return [self._shard(module.get_submodule(name)) for name in reversed(names)][::-1]
        if own[0] is module or policy is not None:
            found = f"policy={policy!r:.60} is given" if policy is not None else "the module itself is one of them"
            raise ConfigError(
                f"{type(module).__name__}.configure_sharding shards {len(own)} parts, but {found}; let it shard parts "
                "of the module, whose rest the strategy shards, and leave policy out."
            )
        return list(own)

    def _shard(self, part: nn.Module, *, is_root: bool = False) -> Any:
        """Shard what a part has beyond the units inside of it. Collective: every rank calls it."""
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        self._make_equal(part)
        offload = CPUOffloadPolicy(pin_memory=self._device.type != "cpu")
        return fully_shard(
            part,
            mesh=self._mesh,
            # None is torch's default for a root, which keeps what backward needs first
            reshard_after_forward=None if isinstance(part, StepCaller) and self._reshards else self._reshards,
            mp_policy=self._mixed_precision(part, is_root=is_root),
            offload_policy=offload if self._options.cpu_offload else OffloadPolicy(),
        )

    def _make_equal(self, part: nn.Module) -> None:
        """Bring the tensors of a part that are not sharded yet to the device, with rank 0's values."""
        tensors = [t for t in chain(part.parameters(), part.buffers()) if not (is_dtensor(t) or t.is_meta)]
        for tensor in tensors:
            tensor.data = tensor.data.to(self._device)
        copy_from_first(tensors, self._collectives)

    def _shard_children(self) -> list[Any]:
        """Shard each child of the module as a root of its own."""
        module = self.module
        roots = list(_with_forward(module))
        inside = Counter(parameter for root in roots for parameter in set(root.parameters()))
        wrong = [name for name, parameter in module.named_parameters() if inside[parameter] != 1]
        if wrong:
            raise ModuleError(
                f"{', '.join(wrong[:5])} of {type(module).__name__} belongs to no child, or to several, and "
                "automatic_optimization=False: the parameters of a child are gathered when its forward is called; put "
                "them into one child module."
            )
        for root in roots:
            if any(not is_dtensor(parameter) for parameter in root.parameters()):
                self._shard(root, is_root=True)
            else:
                self._make_equal(root)
        return [root for root in roots if next(root.parameters(), None) is not None]

    def _mixed_precision(self, part: nn.Module, *, is_root: bool) -> Any:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        given, dtype = self._options.mixed_precision, self._precision.autocast_dtype
        if given is None and (dtype is None or isinstance(part, _BatchNorm)):
            return MixedPrecisionPolicy()
        policy = given or MixedPrecisionPolicy(
            param_dtype=dtype,
            reduce_dtype=torch.float32,
            output_dtype=torch.float32,
            # a batch holds targets as well as inputs, and autocast casts what it has to
            cast_forward_inputs=not isinstance(part, StepCaller),
        )
        # an inner part that returned float32 would meet the next one's parameters
        return policy if is_root else replace(policy, output_dtype=None)

    def fill(self, deferred: DeferredInit, places: Places) -> None:
        """Give what has no memory yet its shard of the values that were recorded. Collective: every rank calls it.

        Raises:
            ModuleError: for tensors of which none were.
        """
        module = self.module
        known = {name for names in places.values() for name in names}
        empty = {name for name, tensor in _named_tensors(module) if tensor.is_meta}
        if not empty:
            return
        if empty - known:
            raise ModuleError(
                f"{', '.join(sorted(empty - known)[:5])} of {type(module).__name__} has no values, found it on the "
                "meta device; build it in configure_model, without torch.device('meta'), and set deferred_init=True."
            )
        shard_device = torch.device("cpu") if self._options.cpu_offload else self._device

        def allocated(tensor: Tensor) -> Tensor:
            device = shard_device if is_dtensor(tensor) else self._device
            return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

        root: nn.Module = module if self._is_manual else self._roots[0]
        root._apply(allocated)  # noqa: SLF001
        own = dict(_named_tensors(module))

        def take(name: str, value: Tensor) -> None:
            target = own[name]
            with torch.no_grad():
                local_shard(target).copy_(local_shard(shard_like(value.to(target.dtype), target)))

        deferred.generator = self._collectives.broadcast(deferred.generator).cpu()
        deferred.replay(places, take)
        self.parameters = _names(module)

    def _set_prefetch(self) -> None:
        for order, ahead, setter in (
            (self._units, self._options.forward_prefetch, "set_modules_to_forward_prefetch"),
            (self._units[::-1], self._options.backward_prefetch, "set_modules_to_backward_prefetch"),
        ):
            for index, unit in enumerate(order if ahead else ()):
                getattr(unit, setter)(order[index + 1 : index + 1 + ahead])

    def check_all_sharded(self) -> None:
        """Check that no parameter was created after the module was sharded.

        Raises:
            ModuleError: naming those that were.
        """
        whole = [name for name, parameter in self.module.named_parameters() if not is_dtensor(parameter)]
        if whole:
            raise ModuleError(
                f"{', '.join(whole[:5])} of {type(self.module).__name__} came after the module was sharded, so that "
                "its gradients would stay on their rank; create parameters in __init__ or configure_model."
            )

    # --- steps -------------------------------------------------------------------------------------------------------

    def run(self, step_name: str, *args: Any) -> Any:
        """Call the module's step with gathered parameters. Collective: every rank calls it."""
        if step_name not in self._checked_steps:
            self._check_batch(step_name, args)
        if self._is_manual:
            output = getattr(self.module, step_name)(*args)
            if not torch.is_grad_enabled():
                self.reshard()
            return output
        return self._run(step_name, *args)

    def _run(self, step_name: str, *args: Any, **kwargs: Any) -> Any:
        self._is_in_step = True
        try:
            output = self._roots[0](step_name, *args, **kwargs)
        finally:
            self._is_in_step = False
        if not torch.is_grad_enabled():
            self.reshard()  # or hooks between steps would see, and change, copies of the parameters
        return self._caller.rebuild(output)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Be the module's ``forward``, which may also be called between steps; then it has to gather parameters."""
        return self._forward(*args, **kwargs) if self._is_in_step else self._run("forward", *args, **kwargs)

    def _check_batch(self, step_name: str, args: Sequence[Any]) -> None:
        self._checked_steps.add(step_name)
        for tensor in iterate_tensors(args):
            if is_dtensor(tensor) or tensor.device != self._device:
                found = "a DTensor" if is_dtensor(tensor) else f"on {tensor.device}"
                raise ModuleError(
                    f"{step_name} got a tensor of shape {tuple(tensor.shape)} that is {found}, but the ranks of the "
                    f"mesh compute with plain tensors, this one on {self._device}; let transfer_batch_to_device bring "
                    "it there."
                )

    def reshard(self) -> None:
        """Free all gathered parameters."""
        for part in dict.fromkeys((*self._roots, *self._units)):
            part.reshard()

    def set_grad_sync(self, enabled: bool) -> None:
        """Note that a micro-batch begins; only the last of a step synchronises, unless each is to."""
        if enabled == self._syncs:
            return  # torch would walk the module
        self._syncs = enabled
        for root in self._roots:
            root.set_requires_gradient_sync(enabled or self._options.sync_each_micro_batch)
            root.set_is_last_backward(enabled)


def _with_forward(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of a module; in place of a container without a forward, its children."""
    for child in module.children():
        if isinstance(child, CONTAINERS):
            yield from _with_forward(child)
        else:
            yield child


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _names(module: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in module.named_parameters()}


def _match_inputs_of_norms(module: nn.Module) -> None:
    """Let norms take inputs of another dtype than their parameters', gathered in half precision, as they do on GPUs."""
    for part in module.modules():
        if isinstance(part, _NORMS) and part.weight is not None:
            part.register_forward_pre_hook(_match_input)


def _match_input(norm: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    dtype = norm.weight.dtype
    return (args[0].to(dtype), *args[1:]) if args and args[0].dtype != dtype else None
