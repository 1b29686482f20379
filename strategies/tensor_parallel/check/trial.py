"""Trials of a block, whole and cut: its outputs and gradients, and by how much those of two trials differ."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...devices.cuda import rounds_float32
from ...distributed.nested import iterate_tensors
from ...state.dtensor import is_dtensor, whole_tensor
from ...torch_internals.operators import disable_dispatch_modes
from ..exchanges import TensorGroup
from .shares import shared_dim

GRADIENT_OF: Final = "the gradient of "
_TOLERANCES: Final = {torch.float64: 1e-9, torch.float32: 1e-3}
"""The relative difference that rounding may cause; for small values, a tenth of it relative to the largest value."""
_TOLERANCE_OF_HALF: Final = 0.1
_TOLERANCE_OF_TF32: Final = 0.02


@dataclass(frozen=True)
class Trial:
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
        like: Trial | None = None,
        group: TensorGroup | None = None,
    ) -> Trial:
        """Run a block on inputs, and compute the gradients with respect to them and the parameters.

        Outputs after the first may be shares of those of the trial `like`.
        """
        args, kwargs = inputs
        outputs = [t for t in iterate_tensors(run(*args, **kwargs)) if t.is_floating_point()]
        shares = _find_shares(outputs, like, group)
        given = {_gradient_of_input(at): t for at, t in enumerate(iterate_tensors(inputs))}
        given |= {f"{GRADIENT_OF}{name}": p for name, p in parameters.items()}
        wanted = {name: t for name, t in given.items() if t.requires_grad} if parameters else {}
        sources = {at: output for at, output in enumerate(outputs) if output.requires_grad}
        gradients: Any = [None] * len(wanted)
        if sources and wanted:
            directions = [_make_direction(output, shares.get(at), group) for at, output in sources.items()]
            found = list(sources.values()), list(wanted.values())
            gradients = torch.autograd.grad(*found, directions, allow_unused=True)
        pairs = zip(wanted, gradients, strict=True)
        return cls(
            {f"output {at}": whole_of(output).detach() for at, output in enumerate(outputs)},
            {name: whole_of(gradient) for name, gradient in pairs if gradient is not None},
            shares,
        )

    def as_seen_by(self, cut: Trial, taken: Mapping[int, int], group: TensorGroup) -> Trial:
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


def _find_shares(outputs: Sequence[Tensor], like: Trial | None, group: TensorGroup | None) -> dict[int, int]:
    """Return which outputs are shares of another trial's, with the dimension that is cut; never all of them."""
    if like is None or group is None or len(outputs) != len(like.outputs):
        return {}
    pairs = enumerate(zip(like.outputs.values(), outputs, strict=True))
    dims = {at: shared_dim(whole.shape, own.shape, group.size) for at, (whole, own) in pairs}
    return {} if dims.get(0) is not None else {at: dim for at, dim in dims.items() if dim is not None}


class Dtypes(TorchFunctionMode):
    """Collects the dtypes in which something is computed that has a gradient: a float64 norm may compute in float32.

    Args:
        with_constants: collect the dtypes of all else, too, as where nothing has a gradient.
    """

    def __init__(self, *, with_constants: bool) -> None:
        super().__init__()
        self._with_constants = with_constants
        self.found = set[torch.dtype]()

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[object] = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        has_values = isinstance(result, Tensor) and result.is_floating_point()
        if has_values and (result.requires_grad or self._with_constants):
            self.found.add(result.dtype)
        return result


@contextmanager
def isolating_trials() -> Iterator[None]:
    """Isolate trials from activation checkpointing around them, and from the fast path of torch's encoder layers.

    That path fills padded positions with other values.
    """
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.autograd.graph.saved_tensors_hooks(_return_unchanged, _return_unchanged), disable_dispatch_modes():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


def _return_unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _make_direction(output: Tensor, shared: int | None, group: TensorGroup | None) -> Any:
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

    mesh, placements = output.device_mesh, output.placements
    return DTensor.from_local(weights, mesh, [Replicate()] * mesh.ndim, run_check=False).redistribute(mesh, placements)


def relative_difference(whole: Tensor, cut: Tensor, size: float, met: Collection[torch.dtype]) -> float:
    """Return by how much two tensors differ, relative to the first; 0 if rounding can be the reason."""
    if whole.shape != cut.shape:
        return torch.inf
    is_undefined = whole.isnan()  # as in one process
    if is_undefined.any() and torch.equal(is_undefined, cut.isnan()):
        whole, cut = whole[~is_undefined], cut[~is_undefined]
    if not whole.numel():
        return 0.0
    tolerance = max(_rounding_tolerance(dtype, whole.device.type) for dtype in {whole.dtype, *met})
    most = float((whole - cut).abs().max())
    own = float(whole.abs().max())
    if most <= tolerance * (own + 0.1 * size):
        return 0.0
    return min(most / (own or 1.0), 1e30) if most == most else torch.inf


def _rounding_tolerance(dtype: torch.dtype, kind: str) -> float:
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
    is_rounded = dtype == torch.float32 and rounds_float32(kind)
    return _TOLERANCE_OF_TF32 if is_rounded else _TOLERANCES.get(dtype, _TOLERANCE_OF_HALF)


def whole_of(tensor: Tensor) -> Tensor:
    """Return all of a tensor, which may be cut. Collective for one that is."""
    if not is_dtensor(tensor):
        return tensor
    is_packed = any(getattr(placement, "split_factor", 1) > 1 for placement in tensor.placements)
    return whole_tensor(tensor) if is_packed else tensor.full_tensor()


def leaf_of(parameter: Tensor) -> Tensor:
    """Return a whole parameter apart from all graphs, with a gradient of its own. Collective for one that is cut."""
    whole = whole_tensor(parameter) if is_dtensor(parameter) else parameter.detach()
    return whole.requires_grad_(parameter.requires_grad)
