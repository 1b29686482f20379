"""Cuts: a module's layers that are cut over tp ranks, its experts dealt over ep ranks, and sequences over cp ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...common.errors import ConfigError
from ..context_parallel.cut_steps import CutSteps
from ..distributed.collectives import Collectives
from ..distributed.nested import map_tensors
from ..experts.dispatch import deal_experts
from ..experts.find_experts import check_experts, find_experts
from ..experts.router_check import RouterCheck
from ..parallel.equal_ranks import make_equal
from ..parallel.mesh import DATA_AXES, Degrees, in_stage
from ..state.dtensor import gather_tensor, is_dtensor, whole_tensor
from ..tensor_parallel.check.block_check import BlockCheck
from ..tensor_parallel.cutting import check_cut, cut_module
from ..tensor_parallel.loss import loss_context
from ..tensor_parallel.tensor_plan import TensorPlan
from ..units.dealt_layers import DealtLayers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Cuts:
    """What of a module is cut over ranks beside its parameters; by default nothing.

    Args:
        degrees: of parallelism; None where nothing can be cut, and a step may return DTensors.
        find_plan: returns how the layers of a module are cut; needed where tp is more than 1.
        loss_parallel: whether logits stay sharded by vocabulary up to the loss.
        sequences: cuts sequences; None if they are whole.
        sequence_ranks: the ranks that have parts of the same sequences; None if they are whole.
        expert_mesh: the device mesh of experts; None if each rank has all of them.
    """

    def __init__(
        self,
        degrees: Degrees | None = None,
        *,
        find_plan: Callable[[nn.Module], TensorPlan] | None = None,
        loss_parallel: bool = False,
        sequences: CutSteps | None = None,
        sequence_ranks: Collectives | None = None,
        expert_mesh: DeviceMesh | None = None,
    ) -> None:
        self.degrees, self._gathers = degrees or Degrees(), degrees is not None
        self._find_plan, self._loss_parallel = find_plan, loss_parallel
        self.sequences, self.sequence_ranks = sequences, sequence_ranks
        self._expert_mesh = expert_mesh
        self._check: BlockCheck | None = None

    def begin(self, module: nn.Module, *, is_manual: bool) -> None:
        """Begin a run of a module.

        Raises:
            ConfigError: for one in manual optimization, where sequences are cut.
        """
        if self.sequences is None:
            return
        if is_manual:
            raise ConfigError(
                f"cp={self.degrees.cp} needs a module with automatic_optimization=True, got {type(module).__name__} "
                "with False; return the loss, or use cp=1."
            )
        self.sequences.begin(module)

    def cut_layers(
        self,
        module: nn.Module,
        mesh: DeviceMesh | None,
        device: torch.device,
        peers: Collectives,
        here: Callable[[TensorPlan], TensorPlan] | None = None,
    ) -> None:
        """Cut the layers of a module. Collective.

        Args:
            module: the module.
            mesh: the device mesh of the tp ranks; None where tp is 1.
            device: of this rank.
            peers: the ranks that hold the same pipeline stages.
            here: returns the cuts of the layers that this rank holds; all, by default.
        """
        if self.degrees.tp == 1:
            return
        if any(is_dtensor(parameter) for parameter in module.parameters()):  # its configure_sharding has split it
            check_cut(module, self.degrees.tp)
            return
        assert self._find_plan is not None and mesh is not None
        plan = self._find_plan(module)
        plan.validate(module, self.degrees.tp)
        copies = sorted(set(plan.copies(module, self.degrees.tp).values()))
        if here is not None:
            plan = here(plan)
        for name in plan.words:
            layer = module.get_submodule(name)
            make_equal(chain(layer.parameters(), layer.buffers()), device, peers)
        self._check = None if peers.is_fake else BlockCheck(module, plan, mesh, tells=peers.rank == 0)
        cut_module(module, plan, mesh, copies)

    @property
    def has_dealt_experts(self) -> bool:
        """Whether experts are dealt over ranks, so that tokens travel."""
        return self._expert_mesh is not None

    def deal_experts(
        self, module: nn.Module, device: torch.device, peers: Collectives, elsewhere: Collection[nn.Parameter]
    ) -> DealtLayers:
        """Deal a module's experts over ranks, and return their layers. Collective; see `cut_layers`.

        Args:
            module: the module.
            device: of this rank.
            peers: the ranks that hold the same pipeline stages.
            elsewhere: the parameters that only ranks of other stages hold.
        """
        mesh = self._expert_mesh
        if mesh is None:
            return DealtLayers()
        own, experts = mesh[self._expert_axis], find_experts(module)
        check_experts(module, own.size())
        layers = [module.get_submodule(name) for name in experts]
        here = [parameter for layer in layers for parameter in layer.parameters() if parameter not in elsewhere]
        make_equal(here, device, peers)
        for name, dispatch in deal_experts(module, experts, own, elsewhere).items():
            around = name.rpartition(".")[0]
            router = module.get_submodule(around)
            if around and not peers.is_fake and RouterCheck.fits(router):
                RouterCheck(around, router, dispatch, dispatch.group)
        data = tuple(axis for axis in mesh.mesh_dim_names or () if axis in DATA_AXES)
        return DealtLayers(layers, mesh[data], own.size())

    @property
    def _expert_axis(self) -> str:
        return "ep" if self.degrees.pp == 1 else in_stage("ep")

    def lent(self, parameter: Any) -> Tensor:
        """Return a DTensor as a rank of another stage computes with it: whole, or what ep deals to both.

        Collective: the ranks that share it.
        """
        from torch.distributed.tensor import Replicate

        axes = parameter.device_mesh.mesh_dim_names
        if self._expert_axis not in axes:
            return whole_tensor(parameter)
        kept = axes.index(self._expert_axis)
        placements = [place if axis == kept else Replicate() for axis, place in enumerate(parameter.placements)]
        lent: Tensor = parameter.detach().redistribute(placements=placements).to_local()
        return lent

    # --- steps -------------------------------------------------------------------------------------------------------

    def run(self, module: nn.Module, run: Callable[..., object], step_name: str, *args: object) -> object:
        """Call `run` with a step and this rank's part of the sequences among its arguments."""
        checked = partial(self._run_checked, run)
        if self.sequences is None:
            return checked(step_name, *args)
        return self.sequences.run(step_name, module, args, checked)

    def _run_checked(self, run: Callable[..., object], step_name: str, *args: object) -> object:
        """Call `run`; in the first steps of each kind, compare cut layers with whole ones."""
        if self._check is None:
            return run(step_name, *args)
        with self._check.during(is_training=step_name == "training_step"):
            output = run(step_name, *args)
        if self._check.is_complete:
            self._check = None
        return output

    def compare(
        self,
        module: nn.Module,
        run: Callable[..., object],
        step_name: str,
        steps: Sequence[Sequence[object]],
        *,
        has_idle: bool,
    ) -> None:
        """Compare steps with ones on whole sequences, for which `run` is called, see `CutSteps`. Collective."""
        if self.sequences is not None:
            self.sequences.check(step_name, module, steps, partial(run, step_name), has_idle=has_idle)

    def skip_comparison(self, step_name: str) -> None:
        """Note that other ranks have compared a step, which this one has no samples of."""
        if self.sequences is not None:
            self.sequences.skip_check(step_name)

    def loss_context(self) -> AbstractContextManager[object]:
        """Return the context of a step, in which a loss may have logits that are sharded."""
        return loss_context() if self._loss_parallel else nullcontext()

    def gathered(self, output: object) -> Any:
        """Return what a step has returned, with whole tensors."""
        return map_tensors(gather_tensor, output) if self._gathers else output

    @property
    def has_cut_sequences(self) -> bool:
        """Whether the step that runs now has a part of the sequences."""
        return self.sequences is not None and self.sequences.context.is_cut

    def recomputing(self) -> AbstractContextManager[object]:
        """Return the context of a backward: activation checkpointing needs positions and attention again."""
        return nullcontext() if self.sequences is None else self.sequences.context.recomputing()

    def annotate(self, error: BaseException) -> None:
        """Add a note to an error whose cause is that sequences are cut."""
        if self.sequences is not None:
            self.sequences.annotate(error)
