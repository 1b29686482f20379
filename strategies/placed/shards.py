"""PlacedShards: a module of whose parameters each process keeps shards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...common.errors import ConfigError, ModuleError, RunError
from ..context_parallel.cut_steps import CutSteps
from ..devices.moves import move_kept_state
from ..distributed.collectives import Collectives
from ..distributed.nested import map_tensors
from ..launch.registries import follow_classes
from ..module.deferred_init import DeferredInit
from ..module.memory_estimate import MemoryShare
from ..parallel.equal_ranks import run_configure_sharding
from ..parallel.optimizer_probe import OptimizerProbe, check_can_be_sharded
from ..parallel.replica_check import ReplicaCheck, ReplicaDifference
from ..parallel.shard_update import note_use_of_shards, on_shards, step_on_shards
from ..parallel.sharded_module import ShardedModule
from ..parallel.sharding_policy import ShardingOptions
from ..pretrained.whole_builds import warn_of_whole_builds
from ..state.dtensor import clip_by_norm, gather_whole, is_dtensor, local_shard, multiply_all, shard_like, whole_tensor
from ..state.optimizer_state import agree_on_wrapped
from ..state.random_shards import draw_whole
from ..state.shards import Holders
from ..state.tied_names import as_tied
from ..torch_internals.sharded_units import list_gathered_parameters
from ..torch_internals.tensors import clamp_together
from ..units.gradient_hooks import GradientHooks
from ..units.whole_parameters import is_kept_whole
from .cuts import Cuts
from .placed import ClipAlgorithm, Placed, Site
from .plain_copies import PlainCopies, attributes_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Sharding:
    """How the parameters of a module are sharded, and what is known of its building."""

    mesh: DeviceMesh
    """The device mesh of all ranks."""
    options: ShardingOptions
    deferred: DeferredInit
    """What was recorded while the module was built without memory."""
    is_manual: bool
    """Whether the step itself computes gradients and updates."""


class PlacedShards(Placed):
    """A `ShardedModule` on several ranks, whose layers and sequences may be cut. Collective: every rank makes one.

    Args:
        site: where it lies.
        module: the module, as ``configure_model`` has built it.
        sharding: how its parameters are sharded.
        cuts: what else is cut.
    """

    def __init__(self, site: Site, module: nn.Module, sharding: Sharding, cuts: Cuts) -> None:
        super().__init__(site, module)
        mesh, deferred, before = sharding.mesh, sharding.deferred, attributes_of(module)
        self._cuts, self._holders = cuts, Holders()
        self._plain_only: set[int] = set()
        """The ids of optimizers whose operations fail on DTensors, and that update each element by itself."""
        cuts.begin(module, is_manual=sharding.is_manual)
        draw_whole()
        # also for an evaluation, since it may be trained next
        is_manual = sharding.is_manual or not getattr(module, "automatic_optimization", True)
        places, hooks = deferred.places(module), GradientHooks(module)  # before the conversion replaces tensors
        move_kept_state(module, self.device)
        self.precision.convert_module(module)
        run_configure_sharding(module, mesh, self.device, self.ranks.all)
        self._cut(sharding)
        elsewhere = self._elsewhere()
        dealt = cuts.deal_experts(module, self.device, self.ranks.peers, elsewhere)
        collectives, runs = self._sharing()
        self._sharded = ShardedModule(
            module,
            mesh,
            collectives=collectives,
            data_collectives=self.ranks.data,
            device=self.device,
            precision=self.precision,
            options=sharding.options,
            is_manual=is_manual,
            elsewhere=elsewhere,
            dealt=dealt,
            runs=runs,
        )
        follow_classes(module)
        warn_of_whole_builds(module, site.name, self.ranks)
        self._sharded.fill(deferred, places)
        hooks.attach(module, self._sharded.roots, is_manual=is_manual)
        self._gradient_hooks = hooks
        self._plain = PlainCopies(before)

    def begin_run(self, site: Site, sequences: CutSteps | None, *, is_manual: bool) -> None:
        """Begin another run of the module, with the site and what cuts the sequences of that run."""
        self._take_site(site)
        self._cuts.sequences = sequences
        self._cuts.begin(self.module, is_manual=is_manual)

    def _cut(self, sharding: Sharding) -> None:
        """Cut the module before its parameters are sharded. Collective."""
        mesh = sharding.mesh["tp"] if self._cuts.degrees.tp > 1 else None
        self._cuts.cut_layers(self.module, mesh, self.device, self.ranks.peers)

    def _elsewhere(self) -> Collection[nn.Parameter]:
        """Return the parameters that only other ranks hold."""
        return ()

    def _sharing(self) -> tuple[Collectives, Callable[..., object] | None]:
        """Return the ranks that shard this one's parameters, and what runs partial steps."""
        return self.ranks.all, None

    def holds(self, module: nn.Module) -> bool:
        """Return whether this is the module that lies here, sharded."""
        parameters = list(module.parameters())
        return self.module is module and (any(map(is_dtensor, parameters)) or all(map(is_kept_whole, parameters)))

    @property
    def memory_share(self) -> MemoryShare:
        return MemoryShare(self._share, self._share, self._share)

    def _share(self, parameter: Tensor) -> float:
        if not is_dtensor(parameter):
            return 0.0 if parameter.is_meta else 1.0  # of another stage
        return len(self._holders.of(parameter)) / self.ranks.peers.world_size

    def take_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        self._sharded.check_all_sharded()
        check_kinds(optimizers, self.site.name)
        for optimizer in optimizers:
            held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            foreign = [tuple(parameter.shape) for parameter in held if parameter not in self._sharded.parameters]
            if foreign:
                raise ModuleError(
                    f"{len(foreign)} of {len(held)} parameters of {type(optimizer).__name__} are not the module's, of "
                    f"shapes {foreign[:3]}: it was built before the module was sharded and would not train it; build "
                    "it in configure_optimizers from self.parameters()."
                )
            steps_on_plain = self._check_optimizer(OptimizerProbe(optimizer))
            (self._plain_only.add if steps_on_plain else self._plain_only.discard)(id(optimizer))

    def _check_optimizer(self, probe: OptimizerProbe) -> bool:
        """Return whether an optimizer has to step on plain shards. Collective.

        Raises:
            ConfigError: for one that would take other steps on shards.
        """
        return check_can_be_sharded(probe, self.site.name, self.ranks.all)

    def annotate(self, error: BaseException) -> None:
        note_use_of_shards(error, self.module)
        self._cuts.annotate(error)

    # --- for every micro-batch and step ------------------------------------------------------------------------------

    def step_fn(self, step_name: str) -> Callable[..., object]:
        return partial(self._run, step_name)

    def _run(self, step_name: str, *args: object) -> object:
        self._compare_sequences(step_name, args)
        return self._cuts.run(self.module, self._run_step, step_name, *args)

    def _run_step(self, step_name: str, *args: object) -> object:
        with self._cuts.loss_context():
            with self.forward_context:
                output = self._sharded.run(step_name, *args)
            self._gradient_hooks.link()
        return self._cuts.gathered(output)

    def _compare_sequences(self, step_name: str, *steps: Sequence[object]) -> None:
        """Compare steps with ones on whole sequences, if sequences are cut. Collective."""
        has_idle = self._sharded.runs.has_idle
        self._cuts.compare(self.module, self._run_to_compare, step_name, steps, has_idle=has_idle)

    def _run_to_compare(self, step_name: str, *args: object) -> object:
        """Run a step with whole sequences, and without checks."""
        with self._sharded.runs.writes.ignored():
            return self._run_step(step_name, *args)

    def beside_idle(self, step_name: str, busy: Sequence[bool], lent: object) -> AbstractContextManager[None]:
        return self._sharded.runs.beside_idle(step_name, busy, lent)

    def stand_by(self, step_name: str, busy: Sequence[bool], run: Callable[[object], None]) -> None:
        self._scale_nothing()
        self._sharded.stand_by(step_name, busy, run)
        self._cuts.skip_comparison(step_name)  # the busy ranks have made it

    def _scale_nothing(self) -> None:
        """Let the gradient scaler see this rank, whose update needs the scale also without a loss."""
        if self.precision.uses_scaler:
            self.scaling.scale(torch.zeros((), device=self.device))

    def set_grad_sync(self, enabled: bool) -> None:
        self._sharded.set_grad_sync(enabled)

    def backward(self, loss: Tensor, *args: object, **kwargs: object) -> None:
        with self._cuts.recomputing(), self._sharded.runs.order.watching():
            super().backward(loss, *args, **kwargs)
        self.end_backward()

    def end_backward(self) -> None:
        self._sharded.runs.end_backward()

    def unscale(self, optimizer: Optimizer) -> None:
        if not self.precision.uses_scaler or self.scaling.has_unscaled(optimizer):
            return
        # torch's scaler takes no DTensors beside plain tensors
        has_whole = self._sharded.runs.whole is not None
        with on_shards(optimizer) if has_whole else nullcontext():
            super().unscale(optimizer)
        if has_whole or self.ranks.data is not self.ranks.all:
            # torch asks the ranks of the first gradient's mesh
            self.scaling.share_overflows(optimizer, self.ranks.all)

    def scale_gradients(self, factor: Tensor | float) -> None:
        multiply_all([local_shard(p.grad) for p in self.module.parameters() if p.grad is not None], factor)

    def clip(self, optimizer: Optimizer, limit: float, algorithm: ClipAlgorithm) -> Tensor | None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients = [parameter.grad for parameter in parameters]
        if algorithm == "norm":
            return clip_by_norm(gradients, limit, self.ranks.all, self._holders, self._copies_of(parameters))
        if gradients:
            shards = [local_shard(gradient) for gradient in gradients]
            clamp_together(shards, limit)
        return None

    def _copies_of(self, parameters: Sequence[Tensor]) -> Sequence[int] | None:
        """Return how many ranks hold each parameter beside those of its mesh; None for none."""
        return None

    def step(self, optimizer: Optimizer, closure: Callable[[], object] | None = None) -> object:
        # a closure computes the gradients of DTensors, and torch's scaler reads them
        if id(optimizer) in self._plain_only:
            self.unscale(optimizer)
            with on_shards(optimizer):
                return super().step(optimizer, closure)
        if self.precision.uses_scaler or closure is not None:
            return super().step(optimizer, closure)
        step_on_shards(optimizer, optimizer.step)
        return None

    # --- state -------------------------------------------------------------------------------------------------------

    def sync_replicas(self, *, only_compares: bool = False, with_buffers: bool = False) -> ReplicaDifference | None:
        self._sharded.reshard()
        if not only_compares:
            self._sharded.runs.writes.agree()
            # a sharded buffer differs between ranks
            self.sync_buffers({name: b for name, b in self.module.named_buffers() if not is_dtensor(b)})
        return ReplicaCheck(self.module, self.ranks.all, self._ranks_of).compare(with_buffers=with_buffers)

    def _ranks_of(self, name: str, parameter: Tensor) -> Sequence[int]:
        """Return the ranks that hold the same part of a parameter, or a buffer, as this one."""
        return self._holders.of(parameter) if is_dtensor(parameter) else self.ranks.peers.ranks

    def model_state(self) -> dict[str, object]:
        self._sharded.reshard()
        self._sharded.check_all_sharded()
        return super().model_state()

    def full_model_state(self) -> dict[str, object]:
        return as_tied(self.module, gather_whole(self.model_state(), is_kept=self._is_first_of_node()))

    def _whole_of(self, part: nn.Module) -> dict[Tensor, Tensor]:
        if all(part is not each for each in self.module.modules()):
            raise ConfigError(
                f"strategy.gathered must get a part of {type(self.module).__name__}, which strategy="
                f"{self.site.name!r} has placed, got another {type(part).__name__}; name the part as self.<name>."
            )
        if not self._is_whole_step:
            raise RunError(
                f"strategy.gathered was called inside a step of strategy={self.site.name!r}, in which each rank has "
                "only a part of the model or of the sequences; call it in a hook, such as on_validation_epoch_end."
            )
        shards = {gathered: shard for shard, gathered in list_gathered_parameters(self._sharded.roots)}
        named = {p: name for name, p in self.module.named_parameters()}
        found = {p: self._whole_parameter(named[p], shards.get(p, p)) for p in part.parameters()}
        return found | self._copied_buffers(part)

    @property
    def _is_whole_step(self) -> bool:
        """Whether code that runs now has the whole module and whole sequences."""
        return not self._cuts.has_cut_sequences

    def _whole_parameter(self, name: str, shard: Tensor) -> Tensor:
        """Return a whole parameter on the device. Collective."""
        return whole_tensor(shard) if is_dtensor(shard) else shard

    def _copied_buffers(self, part: nn.Module) -> dict[Tensor, Tensor]:
        """Return copies of the buffers of a part. Collective."""
        return {b: whole_tensor(b) if is_dtensor(b) else b.detach().clone() for b in part.buffers()}

    def load_model_state(self, state: Mapping[str, object], *, strict: bool = True) -> None:
        own = self.module.state_dict()
        sharded = {name: shard_like(value, own.get(name)) for name, value in state.items()}
        super().load_model_state(sharded, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self._sharded.reshard()
        return agree_on_wrapped(super().optimizer_state(optimizer), self.ranks.all)

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        own = dict(self.module.named_parameters())
        sharded = {
            name: map_tensors(partial(shard_like, like=own.get(name)), values)
            for name, values in state["state"].items()
        }
        super().load_optimizer_state(optimizer, {**state, "state": sharded})


def check_kinds(optimizers: Sequence[Optimizer], strategy_name: str) -> None:
    """Raise a `ConfigError` for an optimizer that treats all parameters as one vector."""
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                f"strategy={strategy_name!r} cannot train with {type(optimizer).__name__}, which treats all parameters "
                "as one vector; use another optimizer, or strategy='ddp'."
            )
