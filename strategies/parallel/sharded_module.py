"""ShardedModule: each rank holds shards of a module, and steps gather them one unit at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...common.errors import ConfigError, ModuleError
from ..distributed.collectives import Collectives
from ..distributed.nested import iterate_tensors
from ..module.blocks import CONTAINERS
from ..module.deferred_init import DeferredInit, Places
from ..module.norms import match_inputs_of_norms
from ..module.precision import Precision
from ..state.dtensor import is_dtensor
from ..torch_internals.sharded_units import answer_for_torch, reduce_sharded_gradients, set_syncs
from ..units.dealt_layers import DealtLayers
from ..units.large_layers import LargeLayers, LayerUnit
from ..units.unit_runs import UnitRuns
from ..units.whole_parameters import WholeParameters
from .equal_ranks import make_equal, overrides_hook
from .filled_shards import FilledShards
from .mesh import DATA_AXES
from .sharding_policy import ShardingOptions, large_layers
from .step_caller import SYNCHRONIZED, StepCaller
from .unit_dtypes import check_dtypes, policy_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ShardedModule:
    """Shards a module in place: its units, then a root around its steps with the rest of the parameters.

    In manual optimization, each child is a root of its own, since gradients are computed inside the step. Collective:
    every rank makes one.

    Args:
        module: the user's module, which is equal on all ranks afterwards.
        mesh: a DeviceMesh with the axis ``dp_shard``, over which parameters are sharded, optionally with
            ``dp_replicate`` before it; further axes are for the module's ``configure_sharding``.
        collectives: over all ranks.
        data_collectives: over the ranks that read different samples and hold the same parts of the module.
        device: the device of this rank.
        precision: the trainer's precision.
        options: see `ShardingOptions`.
        is_manual: whether the module's step computes gradients and updates itself.
        elsewhere: parameters that other ranks hold, and that are on the meta device here.
        dealt: layers of which the data ranks hold different parts.
        runs: runs a step of a pipeline, see `StepCaller`; its steps are then between `begin_window` and `end_window`.

    Raises:
        ConfigError: for a policy that matches nothing, or that contradicts the module's ``configure_sharding``.
        ModuleError: for parameters that cannot be sharded.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        *,
        collectives: Collectives,
        data_collectives: Collectives,
        device: torch.device,
        precision: Precision,
        options: ShardingOptions,
        is_manual: bool,
        elsewhere: Collection[nn.Parameter] = (),
        dealt: DealtLayers | None = None,
        runs: Callable[..., object] | None = None,
    ) -> None:
        self.module, self._elsewhere = module, set(elsewhere)
        self._mesh, self._collectives, self._device = mesh, collectives, device
        dp_axes = tuple(axis for axis in mesh.mesh_dim_names or () if axis in DATA_AXES)
        self._dp_mesh = mesh if len(dp_axes) == mesh.ndim else mesh[dp_axes]
        self._precision, self._options, self._dealt = precision, options, dealt or DealtLayers()
        # gathered parameters would be outdated after the updates of a manual step; the micro-batches of a pipeline
        # follow each other too closely to gather for each one
        self._reshards = True if is_manual else False if runs is not None else options.reshard_after_forward
        self._whole = WholeParameters(module, collectives, self._elsewhere)
        self._in_layers: set[nn.Parameter] = set()
        self._is_one_unit = runs is not None and self._is_alone()
        names = large_layers(module)  # first: a unit has another class than blocks that share parameters and are none
        self._units = [] if self._is_one_unit else self._shard_units()
        self._caller = StepCaller(module, returns_tensors=True, copies_views=True, runs=runs)
        layers = [] if is_manual or runs is not None else self._shard_layers(names)
        self._in_layers = {parameter for layer in layers for parameter in layer.parameters()}
        self.roots = self._shard_children() if is_manual else [self._shard(self._caller, is_root=True)]
        self._is_manual, self._has_stages = is_manual, runs is not None
        self._set_prefetch()
        ranks = collectives, data_collectives
        self.runs = UnitRuns(
            self.roots,
            self._name_of,
            *ranks,
            is_manual=is_manual,
            has_stages=self._has_stages,
            sends=bool(self._dealt.layers),
            always_agrees=options.find_unused_parameters,
        )
        """What ranks do together around the runs of steps."""
        self.runs.whole = self._whole or None
        if layers:
            self._units += layers
            self.runs.layers = LargeLayers(layers, self.runs.agree_on_reads)
            self.roots[0].register_forward_pre_hook(self.runs.layers.begin)
        if device.type == "cpu":
            match_inputs_of_norms(module)
        self.parameters = _names_by_parameter(module)
        """The names of the sharded parameters."""
        self._checked_steps: set[str] = set()
        self._is_in_step = self._is_known = self._is_gathered = False
        self._syncs = True
        if not is_manual:
            self._forward, module.forward = module.forward, self._call

    def _name_of(self, shard: nn.Parameter) -> str:
        return self.parameters[shard]

    # --- sharding ----------------------------------------------------------------------------------------------------

    def _shard_units(self) -> list[Any]:
        """Shard the submodules that are units, inner ones first, and return them in the module's order."""
        module, policy = self.module, self._options.policy
        own = self._own_units()
        if not own:
            found = [module.get_submodule(n) for n in self._options.find_units(module, self._precision)]
            chosen = {*found, *self._dealt.layers}
            units = [unit for unit in module.modules() if unit in chosen and self._is_here(unit)]
            return [self._shard(unit) for unit in reversed(units)][::-1]
        if own[0] is module or policy is not None:
            reason = f"policy={policy!r:.60} is given" if policy is not None else "the module itself is one of them"
            raise ConfigError(
                f"{type(module).__name__}.configure_sharding shards {len(own)} modules, but {reason}; let it shard "
                "submodules only (the strategy shards the rest of the module), and leave policy out."
            )
        return own

    def _own_units(self) -> list[object]:
        """Return the submodules that the module has sharded itself."""
        return [submodule for submodule in self.module.modules() if _is_sharded(submodule)]

    def _shard_layers(self, names: Sequence[str]) -> list[Any]:
        """Shard these layers outside the blocks as units beside the module's, and return these units."""
        if self._options.policy is not None or overrides_hook(self.module, "configure_sharding"):
            return []
        layers = [LayerUnit(self.module.get_submodule(name)) for name in names]
        # beside the module, whose names must not change, but where the root's hooks find them
        self._caller.layers = nn.ModuleList(layers)
        units = [self._shard(layer) for layer in layers]
        for unit in units:
            unit.set_unshard_in_backward(not unit.frees_after_forward)
        return units

    def _is_alone(self) -> bool:
        """Return whether a stage's root alone can replace units, and its steps can skip torch's hooks.

        Pipeline stages gather everything at once; with a single data rank, there is nothing to gather or reduce either.
        """
        options, parameters = self._options, self.module.parameters()
        is_plain = self._precision.autocast_dtype is None and options.mixed_precision is None
        is_one = self._dp_mesh.size() == 1 and options.policy is None and not self._own_units()
        return is_one and is_plain and len({parameter.dtype for parameter in parameters}) == 1

    def _is_here(self, unit: nn.Module) -> bool:
        return any(parameter not in self._elsewhere for parameter in unit.parameters())

    def _shard(self, submodule: nn.Module, *, is_root: bool = False) -> Any:
        """Shard the parameters of a submodule that are not in units inside it. Collective: every rank calls it."""
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        left_out = self._elsewhere | self._in_layers | set(self._whole.parameters)
        check_dtypes(self.module, submodule, left_out)
        self._make_equal(submodule)
        offload = CPUOffloadPolicy(pin_memory=self._device.type != "cpu")
        reshards: bool | int | None = self._reshards
        if isinstance(submodule, StepCaller) and reshards:
            reshards = None  # torch's default for a root, which keeps the parameters that backward needs first
        elif isinstance(submodule, LayerUnit) and not submodule.frees_after_forward:
            reshards = False  # for the same reason
        answer_for_torch(submodule)
        options: dict[str, Any] = {
            "mp_policy": policy_of(submodule, self._options.mixed_precision, self._precision, is_root=is_root),
            "offload_policy": offload if self._options.cpu_offload else OffloadPolicy(),
        }
        if submodule in self._dealt.layers:
            return self._dealt.shard(submodule, reshards=bool(reshards), **options)
        ignored = left_out or None
        return fully_shard(
            submodule, mesh=self._dp_mesh, reshard_after_forward=reshards, ignored_params=ignored, **options
        )

    def _make_equal(self, submodule: nn.Module) -> None:
        """Move the tensors of a submodule that are not sharded yet to the device, and copy rank 0's values to them."""
        make_equal(chain(submodule.parameters(), submodule.buffers()), self._device, self._collectives)

    def _shard_children(self) -> list[Any]:
        """Shard each child of the module as a root of its own."""
        roots, whole = list(_with_forward(self.module)), set(self._whole.parameters)
        make_equal(self._whole.parameters, self._device, self._collectives)
        inside = Counter(parameter for root in roots for parameter in set(root.parameters()))
        misplaced = [name for name, p in self.module.named_parameters() if inside[p] != 1 and p not in whole]
        if misplaced:
            raise ModuleError(
                f"{', '.join(misplaced[:5])} of {type(self.module).__name__} belongs to no child, or to several, and "
                "automatic_optimization=False, where the parameters of a child are gathered when its forward is "
                "called; put each parameter into one child module."
            )
        for root in roots:
            # one whose parameters are all in units becomes a root as well: it says when these reduce gradients
            if _is_sharded(root) or whole.issuperset(root.parameters()):
                self._make_equal(root)
            else:
                self._shard(root, is_root=True)
        return [root for root in roots if _is_sharded(root)]

    def fill(self, deferred: DeferredInit, places: Places) -> None:
        """Allocate the meta tensors and fill them from the record. Collective: every rank calls it.

        Raises:
            ModuleError: for tensors whose initialization was not recorded.
        """
        shard_device = torch.device("cpu") if self._options.cpu_offload else self._device
        filling = FilledShards(self.module, self._elsewhere, self._device, shard_device)
        root = self.module if self._is_manual else self.roots[0]
        if filling.fill(root, deferred, places, self._collectives):
            self.parameters = _names_by_parameter(self.module)

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
            ModuleError: naming any that were.
        """
        named = self.module.named_parameters()
        known = self._elsewhere.union(self._whole.parameters)
        added = [name for name, p in named if not is_dtensor(p) and p not in known]
        if added:
            raise ModuleError(
                f"{', '.join(added[:5])} of {type(self.module).__name__} was added after the module was sharded, and "
                "its gradients would not be reduced; create parameters in __init__ or configure_model."
            )

    # --- steps -------------------------------------------------------------------------------------------------------

    def run(self, step_name: str, *args: object) -> Any:
        """Call the module's step with gathered parameters. Collective: every rank calls it."""
        if step_name not in self._checked_steps:
            self._check_batch(step_name, args)
        if self._is_manual:
            self.runs.writes.begin(step_name)
            with self.runs.in_order(step_name, syncs=self._syncs):
                output = getattr(self.module, step_name)(*args)
                if not torch.is_grad_enabled():
                    self.reshard()
            self.runs.end(step_name)
            return output
        return self._run(step_name, *args)

    def _run(self, step_name: str, *args: object, **kwargs: object) -> object:
        has_backward = step_name in SYNCHRONIZED and torch.is_grad_enabled()
        with self.runs.in_order(step_name, syncs=self._syncs, has_backward=has_backward):
            output = self._run_step(step_name, *args, **kwargs)
        # otherwise hooks between steps, or a loop between forward and backward, would see and change gathered copies of
        # the parameters, which do not have the gradients
        if step_name != "training_step" or not torch.is_grad_enabled():
            if not (has_backward and self.runs.inner.has_any):
                self.reshard()
            self.runs.end(step_name)
        else:
            self.runs.await_backward(step_name)
        return self._caller.rebuild(output)

    def _run_step(self, step_name: str, *args: object, **kwargs: object) -> object:
        self._is_in_step = self.runs.inner.is_in_step = has_failed = True
        self.runs.writes.begin(step_name)
        try:
            # in each micro-batch, the hooks would cost time only to find everything gathered already
            call = self._caller.forward if self._is_gathered else self.roots[0]
            output = call(step_name, *args, **kwargs)
            has_failed = False
            return output
        finally:
            self._is_in_step = self.runs.inner.is_in_step = False
            if self.runs.layers is not None:
                self.runs.layers.end(step_name, has_failed=has_failed)

    def _call(self, *args: object, **kwargs: object) -> object:
        """Run the module's ``forward``; between steps, run it through the root, which gathers parameters."""
        return self._forward(*args, **kwargs) if self._is_in_step else self._run("forward", *args, **kwargs)

    def _check_batch(self, step_name: str, args: Sequence[object]) -> None:
        self._checked_steps.add(step_name)
        for tensor in iterate_tensors(args):
            if is_dtensor(tensor) or tensor.device != self._device:
                place = "a DTensor" if is_dtensor(tensor) else f"on {tensor.device}"
                raise ModuleError(
                    f"{step_name} must get plain tensors on {self._device}, got one of shape "
                    f"{tuple(tensor.shape)} that is {place}; move it in transfer_batch_to_device."
                )

    def reshard(self) -> None:
        """Free all gathered parameters."""
        self._is_gathered = False
        self.runs.inner.forget()
        for submodule in dict.fromkeys((*self.roots, *self._units)):
            submodule.reshard()

    def set_grad_sync(self, enabled: bool) -> None:
        """Set whether the next backward reduces gradients; with ``sync_each_micro_batch``, every backward does."""
        if enabled == self._syncs:
            return  # torch's setters traverse the whole module
        self._syncs = self._whole.is_due = enabled
        for root in self.roots:
            root.set_requires_gradient_sync(enabled or self._options.sync_each_micro_batch)
            root.set_is_last_backward(enabled)

    # --- steps in which some ranks have no samples -------------------------------------------------------------------

    def stand_by(self, step_name: str, busy: Sequence[bool], run: Callable[[object], None]) -> None:
        """Take part in a step of the busy ranks without samples; see `IdleRanks`. Collective.

        If no rank is busy, the gradients that earlier micro-batches have left are reduced.
        """
        if any(busy):
            self.runs.follow(step_name, busy, run)
        else:
            self._syncs = True
            self.runs.inner.forget()
            self.runs.order.begin("stand_by")
            for root in self.roots:
                reduce_sharded_gradients(root)
            self.runs.order.end()
            self._whole.average()
        self.reshard()

    # --- the micro-batches of a pipeline -----------------------------------------------------------------------------

    def begin_window(self) -> None:
        """Gather all parameters, to be freed by `end_window`. Collective: the ranks of the mesh call it."""
        self.runs.order.begin("training_step")
        for submodule in dict.fromkeys((*self.roots, *self._units)):
            submodule.unshard()
        set_syncs(self.roots[0], False, is_alone=self._is_one_unit)
        self._is_gathered = self._is_one_unit and self._is_known

    def end_window(self) -> None:
        """Reduce the gradients of all backwards, and free all parameters. Collective: the ranks of the mesh call it."""
        self.runs.inner.forget()
        reduce_sharded_gradients(self.roots[0], is_alone=self._is_one_unit and not self._options.cpu_offload)
        self.runs.order.end()
        self.reshard()
        self.runs.end("training_step")
        self._is_known = True  # torch's lazy initialization happens in the hooks of the first call


def _with_forward(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of a module, replacing containers without a forward by their children."""
    for child in module.children():
        if isinstance(child, CONTAINERS):
            yield from _with_forward(child)
        else:
            yield child


def _is_sharded(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def _names_by_parameter(module: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in module.named_parameters()}
