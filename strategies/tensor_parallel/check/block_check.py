"""Check of a plan on the first micro-batch: each block runs whole and cut, and both must compute the same."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from ....common.errors import ModuleError
from ...distributed.nested import iterate_tensors, map_tensors
from ...module.untouched import Untouched
from ...state.dtensor import is_dtensor, plain_kind
from ...targets.in_place_of_logits import asked_of
from ...torch_internals.compiler import is_compiler_imported
from ..cutting import run_as
from ..exchanges import TensorGroup
from ..layers import SummedGradients
from ..tensor_plan import TensorPlan
from .shares import OutputShare, admit_shares, guard_shares, unwrap_share
from .skeleton import Skeleton, copy_detached
from .trial import GRADIENT_OF, Dtypes, Trial, isolating_trials, leaf_of, relative_difference, whole_of
from .whole_activations import WholeActivations

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_FEW: Final = 64
_CAUSES: Final = (
    "Usual causes: a fixed number of heads where the width is cut (write .view(batch, length, -1, head_dim)); packed "
    "weights cut as if they were one (use 'packed_colwise'); a norm, a softmax or a mean over cut features"
)
_CAUSE_OF_GRADIENTS: Final = (
    "Usual cause: a whole layer between cut features, which needs the word 'replicated_with_grad_allreduce'"
)


class _Block(NamedTuple):
    """A block that is called for the first time."""

    name: str
    module: nn.Module
    inputs: tuple[tuple[object, ...], dict[str, object]]
    parameters: Mapping[str, Tensor]
    """Those whose gradients are compared, by their names in the whole module."""


class _Fault(NamedTuple):
    """How a block that is cut differs from the whole one."""

    said: str
    """In one sentence, after the name of the block."""
    is_of_gradient: bool = False
    cause: Exception | None = None


class BlockCheck:
    """Compares each planned block, whole and cut, when it is first called.

    A block takes and returns whole activations: it is the smallest module around layers that pass cut activations to
    each other. Both runs are in eval mode, on copies of the block's inputs, and leave no trace (`Traceless`); gradients
    do not change. Outputs are compared, and so are gradients of inputs and parameters, unless modules inside the block
    gather their parameters themselves. A block that differs under a plan that no user has written is tried again with
    whole activations between its layers, see `WholeActivations`, and goes on so if it is equal, with a warning.

    Args:
        module: the module, before it is cut.
        plan: how its layers are cut.
        mesh: a DeviceMesh with only the axis ``tp``.
        tells: whether this rank warns.

    Example:
        check = BlockCheck(module, plan, mesh)  # keeps structures, and so is made before the module is cut
        cut_module(module, plan, mesh)
        with check.during(is_training=True):  # around micro-batches, until is_complete
            step()

    Raises:
        ModuleError: in the ``with`` block, on all ranks of the tensor parallel group, for a block that differs or fails
            when cut, for layers that no block contains, and for a cut parameter that is used outside its layer.
    """

    def __init__(self, module: nn.Module, plan: TensorPlan, mesh: DeviceMesh, *, tells: bool = True) -> None:
        self._module, self._plan, self._group, self._tells = module, plan, TensorGroup(mesh), tells
        self._skeletons = {name: Skeleton(module.get_submodule(name)) for name in plan.blocks(module)}
        self._blocks = [module.get_submodule(name) for name in self._skeletons]
        self._alternative = WholeActivations(module, plan, self._group)
        self._with_shares = set[str]()
        self._met = set[str]()
        """The blocks that were compared, if only their outputs, in an evaluation."""
        self._warned = set[type]()

    @property
    def is_complete(self) -> bool:
        """Whether every block has been compared."""
        return not self._skeletons

    @contextmanager
    def during(self, *, is_training: bool) -> Iterator[None]:
        """Compare the blocks that are called inside the block: their gradients, too, in training."""
        compare: Any = partial(self._meet, is_training)
        if is_compiler_imported():  # the check of a compiled block must not be compiled
            compare = torch.compiler.disable(compare)
        hooks = [
            self._module.get_submodule(name).register_forward_pre_hook(partial(compare, name), with_kwargs=True)
            for name in self._skeletons
        ]
        try:
            yield
        except Exception as error:
            self._explain(error)
            raise
        finally:
            for hook in hooks:
                hook.remove()
            if self._with_shares and self.is_complete:
                for block in self._blocks:
                    admit_shares(block)
        if is_training and "" in self._skeletons:
            raise ModuleError(
                f"{self._plan.source} cuts {_list_names(self._plan.blocks(self._module)[''])}, which belong to "
                f"{type(self._module).__name__} itself, but its step does not call its forward, so that the cut cannot "
                "be checked. Put these layers into a submodule with a forward, or call self(...) in the step."
            )

    def _explain(self, error: Exception) -> None:
        if "mixed torch.Tensor and DTensor" in str(error) and not isinstance(error, ModuleError):
            between = ", or hidden states between two blocks" if self._plan.sequence_parallel else ""
            raise ModuleError(
                f"a parameter of a cut layer{between} is used outside the layer's forward ({str(error)[:60]}...); call "
                f"the layer instead, or leave it out of tp_plan. These layers are cut: {_list_names(self._plan.words)}."
            ) from error

    def _meet(self, is_training: bool, name: str, block: nn.Module, args: tuple[object, ...], kwargs: Any) -> object:
        """Compare the block, and let it compute with the shares that it is given."""
        is_new = name in self._skeletons and (is_training or name not in self._met)
        if is_new and not (is_training and torch.is_inference_mode_enabled()):
            self._compare(name, block, args, kwargs, is_training=is_training)
        return map_tensors(unwrap_share, (args, kwargs)) if self._with_shares else None

    def _compare(
        self, name: str, block: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], *, is_training: bool
    ) -> None:
        """Compare the block, once. Collective: every rank of the tensor parallel group calls it."""
        skeleton = self._skeletons.pop(name) if is_training else self._skeletons[name]
        self._met.add(name)
        is_reached = not any(_gathers_itself(submodule) for submodule in block.modules() if submodule is not block)
        named = block.named_parameters() if is_training and is_reached else ()
        if asked_of(block) is not None:  # the logits of some tokens are enough, and all may not fit
            args, kwargs = map_tensors(_few_tokens, (args, kwargs))
        given = _Block(name, block, (args, kwargs), {f"{name}.{own}".lstrip("."): p for own, p in named})
        met = Dtypes(with_constants=not is_training)
        whole = self._run_whole(given, skeleton, met)
        cut = self._run_cut(given, whole, met.found)
        if isinstance(cut, _Fault):
            cut = self._run_alternatives(given, whole, met.found, cut)
        if cut.shares and name not in self._with_shares:
            self._with_shares.add(name)
            guard_shares(name, block, cut.shares)

    def _run_whole(self, block: _Block, skeleton: Skeleton, met: Dtypes) -> Trial:
        leaves = {id(p): leaf_of(p) for p in block.module.parameters()}
        run = partial(skeleton.run, block.module, lambda p: leaves[id(p)])
        inputs = copy_detached(map_tensors(self._whole_input, block.inputs))
        with _leaving_no_trace(block.module), met:
            trial = Trial.of(run, inputs, {own: leaves[id(p)] for own, p in block.parameters.items()})
        skeleton.release()
        return trial

    def _run_alternatives(self, block: _Block, whole: Trial, met: Collection[torch.dtype], fault: _Fault) -> Trial:
        """Return the first trial with whole activations that has no fault, as the cut block has. Collective.

        Raises:
            ModuleError: with the fault, if there is none.
        """
        for names in self._alternative.stages(block.name):
            self._alternative.take(names)
            cut = self._run_cut(block, whole, met)
            if not isinstance(cut, _Fault):
                self._warn(fault, names)
                return cut
        raise ModuleError(
            f"the block {block.name!r} ({plain_kind(block.module).__name__}) {fault.said}. "
            f"{self._causes(block.name, is_of_gradient=fault.is_of_gradient)}. Correct the block, or leave its layers "
            "out of tp_plan."
        ) from fault.cause

    def _run_cut(self, block: _Block, whole: Trial, met: Collection[torch.dtype]) -> Trial | _Fault:
        """Return the trial of the block as it is cut now, or how it differs from the whole one. Collective."""
        inputs = copy_detached(map_tensors(unwrap_share, block.inputs))
        try:
            with _leaving_no_trace(block.module):
                cut = Trial.of(block.module.forward, inputs, block.parameters, like=whole, group=self._group)
        except Exception as error:  # noqa: BLE001 - the user's code fails, and may not fail with whole activations
            what = f"{type(error).__name__}: {str(error)[:200]}"
            return _Fault(f"fails when it is cut by {self._plan.source}: {what}", cause=error)
        given = enumerate(iterate_tensors(block.inputs))
        taken = {at: tensor.cut_dim for at, tensor in given if isinstance(tensor, OutputShare)}
        whole = whole.as_seen_by(cut, taken, self._group)
        found = output = self._differences(whole.outputs, cut.outputs, met)
        to_sum: list[nn.Module] = []
        if not output:
            gradient = self._differences(whole.gradients, cut.gradients, met)
            found, to_sum = self._without_summed(block, gradient, whole, cut, met)
        if found:
            value, apart = max(found.items(), key=lambda one: one[1])
            said = f"does not compute the same when it is cut by {self._plan.source}: {value} has a relative difference"
            return _Fault(f"{said} of {apart:.1g}", is_of_gradient=not output)
        for module in to_sum:
            run_as(module, SummedGradients({}), self._group)
        return cut

    def _whole_input(self, tensor: Tensor) -> Tensor:
        """Return all of an input. Collective for a share."""
        if not isinstance(tensor, OutputShare):
            return whole_of(tensor)
        own: Tensor = unwrap_share(tensor).detach()
        return self._group.join(own, tensor.cut_dim).requires_grad_(tensor.requires_grad)

    def _warn(self, fault: _Fault, names: Sequence[str]) -> None:
        part = self._alternative.part_around(names)
        kind = plain_kind(self._module.get_submodule(part))
        if kind in self._warned or not self._tells or self._group.rank:
            return
        self._warned.add(kind)
        warnings.warn(
            f"{kind.__name__} ({part!r}) computes with all heads and features on each of {self._group.size} ranks, as "
            f"it {fault.said}. Its weights are cut all the same. A tp_plan that leaves its layers out saves what is "
            "sent; one of your own may cut it as well.",
            stacklevel=2,
        )

    def _causes(self, name: str, *, is_of_gradient: bool = False) -> str:
        """Return the usual causes of an error in the named block."""
        unpaired = self._plan.unpaired_columns(self._module, name)
        if unpaired:
            return (
                f"{_list_names(unpaired)} returns only this rank's features ('colwise'), and no layer of the block "
                "takes such a part: give the layer that follows the word 'rowwise', or this one "
                "'colwise_gather_output'"
            )
        causes = _CAUSE_OF_GRADIENTS if is_of_gradient else _CAUSES
        sharded = "; a layer that mixes positions, where each rank has only a shard of them"
        return causes + sharded * self._plan.sequence_parallel

    def _differences(
        self, whole: Mapping[str, Tensor], cut: Mapping[str, Tensor], met: Collection[torch.dtype]
    ) -> dict[str, float]:
        """Return the values that differ on any rank, and by how much relative to their sizes. Collective."""
        size = max((float(value.nan_to_num(0.0).abs().max()) for value in whole.values() if value.numel()), default=0.0)
        differences = []
        for name, value in whole.items():
            other = cut.get(name)
            differences.append(torch.inf if other is None else relative_difference(value, other, size, met))
        all_ranks = self._group.largest(torch.tensor([*differences, 0.0], device=self._group.device)).tolist()
        return {name: found for name, found in zip(whole, all_ranks, strict=False) if found > 0}

    def _without_summed(
        self,
        block: _Block,
        differences: Mapping[str, float],
        whole: Trial,
        cut: Trial,
        met: Collection[torch.dtype],
    ) -> tuple[dict[str, float], list[nn.Module]]:
        """Return the gradients that differ and are not summands of the right ones, and the modules of those that are.

        These belong to modules between cut features, for which the plan has no word. Collective.
        """
        found = dict(differences)
        to_sum: list[nn.Module] = []
        owners: dict[str, list[str]] = {}
        for own in differences:
            parameter = block.parameters.get(own.removeprefix(GRADIENT_OF))
            if parameter is not None and not is_dtensor(parameter) and own in cut.gradients:
                owners.setdefault(own.removeprefix(GRADIENT_OF).rpartition(".")[0], []).append(own)
        for owner, gradients in owners.items():
            module = self._module.get_submodule(owner)
            all_own = [own for own, p in module.named_parameters(recurse=False) if p.requires_grad]
            has_word = self._plan.words.get(owner, "replicate") != "replicate"
            # the forward of the block itself is looked up before its hooks are called
            if module is block.module or has_word or len(all_own) != len(gradients):
                continue
            sums = {own: self._group.sum(cut.gradients[own]) for own in gradients}
            if not self._differences({own: whole.gradients[own] for own in gradients}, sums, met):
                to_sum.append(module)
                found = {own: apart for own, apart in found.items() if own not in gradients}
        return found, to_sum


@contextmanager
def _leaving_no_trace(block: nn.Module) -> Iterator[None]:
    """Run a block in eval mode with gradients, and leave no trace."""
    asked = asked_of(block)
    with Untouched(block), isolating_trials(), torch.enable_grad(), nullcontext() if asked is None else asked.paused():
        yield


def _few_tokens(tensor: Tensor) -> Tensor:
    """Return a part of hidden states, of a few tokens."""
    return tensor[:1, :_FEW] if tensor.ndim > 2 else tensor[:_FEW]


def _gathers_itself(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def _list_names(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
