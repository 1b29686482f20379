"""Work of a step: what its operators compute and move, from which the time on a device follows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from torch import Tensor

from ..torch_internals.operators import list_arguments, tree_leaves

ATTENTION: Final = ("aten::_scaled_dot_product", "aten::scaled_dot_product")
"""How the names of torch's attentions begin."""
_ALLOCATIONS: Final = ("aten::empty", "aten::new_empty", "aten::_empty", "aten::detach", "aten::lift_fresh")
_LOOKUPS: Final = ("aten::embedding", "aten::index_select", "aten::gather", "aten::index")
"""Operators that read only as much of their first tensor as they return."""


@dataclass(frozen=True)
class StepWork:
    """What the operators of a step do: products of matrices, attention, and all else, which only moves values."""

    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    """Half of a whole attention where it is causal: torch's kernels leave out what is masked."""
    moved_bytes: float = 0.0
    """What all operators read and write."""
    num_operators: float = 0.0
    """Those that start something on a device."""

    def __add__(self, other: StepWork) -> StepWork:
        return StepWork(*(mine + theirs for mine, theirs in zip(self._values, other._values, strict=True)))

    def times(self, factor: float) -> StepWork:
        """Return as many times this work; operators are as many, only smaller, in a part of it."""
        return StepWork(
            self.matmul_flops * factor,
            self.attention_flops * factor,
            self.moved_bytes * factor,
            self.num_operators * max(1.0, factor),
        )

    def towards(self, other: StepWork, way: float) -> StepWork:
        """Return the linear interpolation, or extrapolation, of this work (`way` 0) and another (1)."""
        pairs = zip(self._values, other._values, strict=True)
        return StepWork(*(max(0.0, here + (there - here) * way) for here, there in pairs))

    @property
    def _values(self) -> tuple[float, ...]:
        return self.matmul_flops, self.attention_flops, self.moved_bytes, self.num_operators


def work_of(
    operator: Any, flops: int, args: tuple[object, ...], kwargs: Mapping[str, object] | None, output: object
) -> StepWork:
    """Return the work of one call of an operator.

    Args:
        operator: the overload of torch's.
        flops: those of its products, for attention of the whole one.
        args: of the call.
        kwargs: of the call.
        output: what it returned.
    """
    name = operator.name()
    if operator.is_view or name.startswith(_ALLOCATIONS):
        return StepWork()
    read, written = _count_bytes([args, kwargs or {}]), _count_bytes(output)
    if name.startswith(_LOOKUPS):
        read = min(read, written)
    if name.startswith(ATTENTION):
        share = 0.5 if _is_causal(operator, args, kwargs or {}) else 1.0
        return StepWork(0.0, flops * share, read + written, 1.0)
    return StepWork(flops, 0.0, read + written, 1.0)


def _is_causal(operator: object, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    names = [argument.name for argument in list_arguments(operator)]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("is_causal", False))


def _count_bytes(values: object) -> int:
    """Return the bytes of tensors; those of an expanded one count once."""
    tensors: Iterable[object] = tree_leaves(values)
    return sum(_own_bytes(tensor) for tensor in tensors if isinstance(tensor, Tensor))


def _own_bytes(tensor: Tensor) -> int:
    if tensor.is_sparse:
        return tensor.values().nbytes if tensor.is_coalesced() else 0
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return prod(sizes) * tensor.element_size()
