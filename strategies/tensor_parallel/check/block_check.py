"""Check of a plan on the first micro-batch: each block runs whole and cut, and both must compute the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ....common.errors import ModuleError
from ...devices.cuda import rounds_float32
from ...distributed.nested import iterate_tensors, map_tensors
from ...module.untouched import Untouched
from ...state.dtensor import is_dtensor, whole_tensor
from ...targets.in_place_of_logits import asked_of
from ...torch_internals import without_dispatch_modes
from ..cutting import run_as
from ..exchanges import TensorGroup
from ..layers import SummedGradients
from ..tensor_plan import TensorPlan
from .shares import OutputShare, admit_shares, guard_shares, plain, shared_dim
from .skeleton import Skeleton, private

_TOLERANCES: Final = {torch.float64: 1e-9, torch.float32: 1e-3}
"""The relative difference that rounding may cause; for small values, a tenth of it relative to the largest value."""
_FEW: Final = 64
_TOLERANCE_OF_HALF: Final = 0.1
_TOLERANCE_OF_TF32: Final = 0.02
_CAUSES: Final = (
    "Usual causes: a fixed number of heads where the width is cut (write .view(batch, length, -1, head_dim)); packed "
    "weights cut as if they were one (use 'packed_colwise'); a norm, a softmax or a mean over cut features"
)

_GRADIENT_OF: Final = "the gradient of "
_CAUSE_OF_GRADIENTS: Final = (
    "Usual cause: a whole layer between cut features, which needs the word 'replicated_with_grad_allreduce'"
)


class BlockCheck:
    """Compares each planned block, whole and cut, when it is first called.

    A block takes and returns whole activations: it is the smallest module around layers that pass cut activations to
    each other. Both runs are in eval mode, on copies of the block's inputs, and leave no trace (`Traceless`); gradients
    do not change. Outputs are compared, and so are gradients of inputs and parameters, unless modules inside the block
    gather their parameters themselves.

    Example:
        check = BlockCheck(module, plan, mesh)  # keeps structures, and so is made before the module is cut
        cut_module(module, plan, mesh)
        with check:  # around micro-batches, until is_complete
            step()

    Raises:
        ModuleError: in the ``with`` block, on all ranks of the tensor parallel group, for a block that differs or fails
            when cut, for layers that no block contains, and for a cut parameter that is used outside its layer.
    """

    def __init__(self, module: nn.Module, plan: TensorPlan, mesh: Any) -> None:
        self._module, self._plan, self._group = module, plan, TensorGroup(mesh)
        self._skeletons = {name: Skeleton(module.get_submodule(name)) for name in plan.blocks(module)}
        self._blocks = [module.get_submodule(name) for name in self._skeletons]
        self._hooks: list[Any] = []
        self._has_shares = False

    @property
    def is_complete(self) -> bool:
        """Whether every block has been compared."""
        return not self._skeletons

    def __enter__(self) -> BlockCheck:
        compare: Any = self._meet
        if "torch._dynamo" in sys.modules:  # the check of a compiled block must not be compiled
            compare = torch.compiler.disable(compare)
        for name in self._skeletons:
            block = self._module.get_submodule(name)
            self._hooks.append(block.register_forward_pre_hook(partial(compare, name), with_kwargs=True))
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._has_shares and self.is_complete:
            for block in self._blocks:
                admit_shares(block)
        is_mixed = "mixed torch.Tensor and DTensor" in str(error)
        if is_mixed and not isinstance(error, ModuleError):
            between = ", or hidden states between two blocks" if self._plan.sequence_parallel else ""
            raise ModuleError(
                f"a parameter of a cut layer{between} is used outside the layer's forward ({str(error)[:60]}...); call "
                f"the layer instead, or leave it out of tp_plan. These layers are cut: {_listed(self._plan.words)}."
            ) from error
        if error is None and "" in self._skeletons:
            raise ModuleError(
                f"{self._plan.source} cuts {_listed(self._plan.blocks(self._module)[''])}, which belong to "
                f"{type(self._module).__name__} itself, but its step does not call its forward, so that the cut cannot "
                "be checked. Put these layers into a submodule with a forward, or call self(...) in the step."
            )

    def _meet(self, name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compare the block, and let it compute with the shares that it is given."""
        self._compare(name, block, args, kwargs)
        return map_tensors(plain, (args, kwargs)) if self._has_shares else None

    def _compare(self, name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the block, once. Collective: every rank of the tensor parallel group calls it."""
        skeleton = self._skeletons.pop(name, None)
        if skeleton is None or torch.is_inference_mode_enabled():
            return
        is_reached = not any(_gathers_itself(submodule) for submodule in block.modules() if submodule is not block)
        names = {f"{name}.{own}".lstrip("."): p for own, p in block.named_parameters()} if is_reached else {}
        leaves = {id(p): _leaf(p) for p in block.parameters()}
        asked = asked_of(block)
        if asked is not None:  # the logits of some tokens are enough, and all may not fit
            args, kwargs = map_tensors(_few_tokens, (args, kwargs))
        paused = nullcontext() if asked is None else asked.paused()
        with Untouched(block) as streams, _apart(), torch.enable_grad(), paused:
            run_whole = partial(skeleton.run, block, lambda p: leaves[id(p)])
            inputs = private(map_tensors(self._whole_input, (args, kwargs)))
            with _Dtypes() as met:
                whole = _Trial.of(run_whole, inputs, {own: leaves[id(p)] for own, p in names.items()})
            skeleton.release()
            streams.rewind()
            try:
                cut = _Trial.of(
                    block.forward, private(map_tensors(plain, (args, kwargs))), names, like=whole, group=self._group
                )
            except Exception as error:
                raise ModuleError(
                    f"the block {name!r} ({type(block).__name__}) fails when it is cut by {self._plan.source}: "
                    f"{type(error).__name__}: {str(error)[:200]}. {self._causes(name)}. Correct the block, or "
                    "leave its layers out of tp_plan."
                ) from error
        given = enumerate(iterate_tensors((args, kwargs)))
        taken = {at: tensor.cut_dim for at, tensor in given if isinstance(tensor, OutputShare)}
        self._judge(name, block, whole.as_seen_by(cut, taken, self._group), cut, met.found)
        if cut.shares:
            self._has_shares = True
            guard_shares(name, block, cut.shares)

    def _whole_input(self, tensor: Tensor) -> Tensor:
        """Return all of an input. Collective for a share."""
        if not isinstance(tensor, OutputShare):
            return _whole(tensor)
        own: Tensor = plain(tensor).detach()
        return self._group.join(own, tensor.cut_dim).requires_grad_(tensor.requires_grad)

    def _judge(self, name: str, block: nn.Module, whole: _Trial, cut: _Trial, met: Collection[torch.dtype]) -> None:
        output = self._differences(whole.outputs, cut.outputs, met)
        gradient = {} if output else self._differences(whole.gradients, cut.gradients, met)
        found = output or self._without_summed(name, block, gradient, whole, cut, met)
        if not found:
            return
        value, difference = max(found.items(), key=lambda one: one[1])
        raise ModuleError(
            f"the block {name!r} ({type(block).__name__}) does not compute the same when it is cut by "
            f"{self._plan.source}: {value} has a relative difference of {difference:.1g}. "
            f"{self._causes(name, is_of_gradient=not output)}. Correct the block, or leave its layers out of tp_plan."
        )

    def _causes(self, name: str, *, is_of_gradient: bool = False) -> str:
        """Return the usual causes of an error in the named block."""
        unpaired = self._plan.unpaired_columns(self._module, name)
        if unpaired:
            return (
                f"{_listed(unpaired)} returns only this rank's features ('colwise'), and no layer of the block takes "
                "such a part: give the layer that follows the word 'rowwise', or this one 'colwise_gather_output'"
            )
        causes = _CAUSE_OF_GRADIENTS if is_of_gradient else _CAUSES
        sharded = "; a layer that mixes positions, where each rank has only a shard of them"
        return causes + sharded * self._plan.sequence_parallel

    def _differences(
        self, whole: Mapping[str, Tensor], cut: Mapping[str, Tensor], met: Collection[torch.dtype]
    ) -> dict[str, float]:
        """Return the values that differ on any rank, and by how much relative to their sizes. Collective."""
        size = max((float(value.abs().max()) for value in whole.values() if value.numel()), default=0.0)
        differences = []
        for name, value in whole.items():
            other = cut.get(name)
            differences.append(torch.inf if other is None else _difference(value, other, size, met))
        all_ranks = self._group.largest(torch.tensor([*differences, 0.0], device=self._group.device)).tolist()
        return {name: found for name, found in zip(whole, all_ranks, strict=False) if found > 0}

    def _without_summed(
        self,
        name: str,
        block: nn.Module,
        differences: Mapping[str, float],
        whole: _Trial,
        cut: _Trial,
        met: Collection[torch.dtype],
    ) -> dict[str, float]:
        """Return the gradients that differ and are not summands of the right ones; these are summed from now on.

        They belong to modules between cut features, for which the plan has no word. Collective.
        """
        found = dict(differences)
        known = {f"{name}.{own}".lstrip("."): parameter for own, parameter in block.named_parameters()}
        owners: dict[str, list[str]] = {}
        for own in differences:
            parameter = known.get(own.removeprefix(_GRADIENT_OF))
            if parameter is not None and not is_dtensor(parameter) and own in cut.gradients:
                owners.setdefault(own.removeprefix(_GRADIENT_OF).rpartition(".")[0], []).append(own)
        for owner, gradients in owners.items():
            module = self._module.get_submodule(owner)
            all_own = [own for own, p in module.named_parameters(recurse=False) if p.requires_grad]
            has_word = self._plan.words.get(owner, "replicate") != "replicate"
            # the forward of the block itself is looked up before its hooks are called
            if module is block or has_word or len(all_own) != len(gradients):
                continue
            sums = {own: self._group.sum(cut.gradients[own]) for own in gradients}
            if not self._differences({own: whole.gradients[own] for own in gradients}, sums, met):
                run_as(module, SummedGradients({}), self._group)
                found = {own: difference for own, difference in found.items() if own not in gradients}
        return found


@dataclass(frozen=True)
class _Trial:
    """The floating-point outputs of a run, and the gradients of a fixed function of them, all whole but the shares."""

    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    shares: Mapping[int, int] = field(default_factory=dict)
    """The outputs of which this rank has only a share, by number, with the dimension that is cut."""

    @classmethod
    def of(
        cls,
        run: Callable[..., Any],
        inputs: tuple[Any, Any],
        parameters: Mapping[str, Tensor],
        like: _Trial | None = None,
        group: TensorGroup | None = None,
    ) -> _Trial:
        """Run a block on inputs, and compute the gradients with respect to them and the parameters.

        Outputs after the first may be shares of those of the trial `like`.
        """
        args, kwargs = inputs
        outputs = [t for t in iterate_tensors(run(*args, **kwargs)) if t.is_floating_point()]
        shares = _shares(outputs, like, group)
        given = {_gradient_of_input(at): t for at, t in enumerate(iterate_tensors(inputs))}
        given |= {f"{_GRADIENT_OF}{name}": p for name, p in parameters.items()}
        wanted = {name: t for name, t in given.items() if t.requires_grad} if parameters else {}
        sources = {at: output for at, output in enumerate(outputs) if output.requires_grad}
        gradients: Any = [None] * len(wanted)
        if sources and wanted:
            directions = [_direction(output, shares.get(at), group) for at, output in sources.items()]
            found = list(sources.values()), list(wanted.values())
            gradients = torch.autograd.grad(*found, directions, allow_unused=True)
        pairs = zip(wanted, gradients, strict=True)
        return cls(
            {f"output {at}": _whole(output).detach() for at, output in enumerate(outputs)},
            {name: _whole(gradient) for name, gradient in pairs if gradient is not None},
            shares,
        )

    def as_seen_by(self, cut: _Trial, taken: Mapping[int, int], group: TensorGroup) -> _Trial:
        """Return this trial, of a whole block, with this rank's share of what is cut in another trial.

        Args:
            cut: the other trial.
            taken: the inputs of which it got a share, by number, with the dimension that is cut.
            group: the ranks.
        """
        outputs, gradients = dict(self.outputs), dict(self.gradients)
        for at, dim in cut.shares.items():
            outputs[f"output {at}"] = outputs[f"output {at}"].chunk(group.size, dim)[group.rank]
        for at, dim in taken.items():
            if _gradient_of_input(at) in gradients:
                whole = gradients[_gradient_of_input(at)]
                gradients[_gradient_of_input(at)] = whole.chunk(group.size, dim)[group.rank]
        return replace(self, outputs=outputs, gradients=gradients)


def _gradient_of_input(at: int) -> str:
    return f"the gradient of its input {at}"


def _shares(outputs: Sequence[Tensor], like: _Trial | None, group: TensorGroup | None) -> dict[int, int]:
    """Return which outputs are shares of another trial's, with the dimension that is cut; never all of them."""
    if like is None or group is None or len(outputs) != len(like.outputs):
        return {}
    pairs = enumerate(zip(like.outputs.values(), outputs, strict=True))
    dims = {at: shared_dim(whole.shape, own.shape, group.size) for at, (whole, own) in pairs}
    return {} if dims.get(0) is not None else {at: dim for at, dim in dims.items() if dim is not None}


class _Dtypes(TorchFunctionMode):
    """Collects the dtypes in which something is computed that has a gradient: a float64 norm may compute in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.found = set[torch.dtype]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point() and result.requires_grad:
            self.found.add(result.dtype)
        return result


@contextmanager
def _apart() -> Iterator[None]:
    """Isolate trials from activation checkpointing around them, and from the fast path of torch's encoder layers.

    That path fills padded positions with other values.
    """
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.autograd.graph.saved_tensors_hooks(_same, _same), without_dispatch_modes():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _few_tokens(tensor: Tensor) -> Tensor:
    """Return a part of hidden states, of a few tokens."""
    return tensor[:1, :_FEW] if tensor.ndim > 2 else tensor[:_FEW]


def _direction(output: Tensor, shared: int | None, group: TensorGroup | None) -> Any:
    """Return weights for an output's elements, the same whole and cut; this rank's, if the output is a share."""
    number = 1 if group is None or shared is None else group.size
    shape = [size * number if dim == shared else size for dim, size in enumerate(output.shape)]
    numbers = torch.arange(output.numel() * number, device=output.device, dtype=torch.float32)
    weights = (numbers * 0.7 + 1).sin().view(shape).to(output.dtype)
    if group is not None and shared is not None:
        return weights.chunk(number, shared)[group.rank]
    if not is_dtensor(output):
        return weights
    from torch.distributed.tensor import DTensor, Replicate

    mesh, placements = output.device_mesh, output.placements  # type: ignore[attr-defined]
    return DTensor.from_local(weights, mesh, [Replicate()] * mesh.ndim, run_check=False).redistribute(mesh, placements)


def _difference(whole: Tensor, cut: Tensor, size: float, met: Collection[torch.dtype]) -> float:
    """Return by how much two tensors differ, relative to the first; 0 if rounding can be the reason."""
    if whole.shape != cut.shape:
        return torch.inf
    if not whole.numel():
        return 0.0
    tolerance = max(_tolerance(dtype, whole.device.type) for dtype in {whole.dtype, *met})
    most = float((whole - cut).abs().max())
    own = float(whole.abs().max())
    if most <= tolerance * (own + 0.1 * size):
        return 0.0
    return min(most / (own or 1.0), 1e30) if most == most else torch.inf


def _tolerance(dtype: torch.dtype, kind: str) -> float:
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
    is_rounded = dtype == torch.float32 and rounds_float32(kind)
    return _TOLERANCE_OF_TF32 if is_rounded else _TOLERANCES.get(dtype, _TOLERANCE_OF_HALF)


def _whole(tensor: Tensor) -> Tensor:
    if not is_dtensor(tensor):
        return tensor
    is_packed = any(getattr(placement, "split_factor", 1) > 1 for placement in tensor.placements)  # type: ignore[attr-defined]
    return whole_tensor(tensor) if is_packed else tensor.full_tensor()  # type: ignore[attr-defined]


def _leaf(parameter: Tensor) -> Tensor:
    whole = whole_tensor(parameter) if is_dtensor(parameter) else parameter.detach()
    return whole.requires_grad_(parameter.requires_grad)


def _gathers_itself(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
