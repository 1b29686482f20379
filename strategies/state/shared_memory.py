"""Shared memory: parameters and buffers of a module that are different objects, but views of the same numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, combinations

import torch
from torch import Tensor, nn

from ...common.errors import ModuleError
from ..torch_internals.fake_tensors import is_without_memory
from ..torch_internals.tensors import is_traceable_wrapper_subclass
from .dtensor import is_dtensor


@contextmanager
def kept_shared(module: nn.Module) -> Iterator[None]:
    """Let tensors that share memory share it again after a conversion inside, for which torch makes each anew."""
    groups = [_place_in_base(group) for group in _group_by_memory(module)]
    yield
    now = dict(chain(module.named_parameters(), module.named_buffers()))  # a conversion replaces buffers
    for base_name, others in groups:
        for name, size, stride, offset in others:
            base, other = now[base_name], now[name]
            if other.untyped_storage().data_ptr() != base.untyped_storage().data_ptr():
                other.data = base.data.as_strided(size, stride, base.storage_offset() + offset)


def _place_in_base(group: list[tuple[str, Tensor]]) -> tuple[str, list[tuple[str, Sequence[int], Sequence[int], int]]]:
    """Return the name of the tensor that covers a whole group, and the places of the others in it, if one does."""
    (name, base), *others = sorted(group, key=lambda named: (named[1].storage_offset(), -_memory_extent(named[1])))
    begin, end = base.storage_offset(), base.storage_offset() + _memory_extent(base)
    if not base.is_contiguous() or any(other.storage_offset() + _memory_extent(other) > end for _, other in others):
        return name, []
    return name, [(each, other.size(), other.stride(), int(other.storage_offset() - begin)) for each, other in others]


def check_unshared(module: nn.Module, strategy: str, *, with_buffers: bool) -> None:
    """Check that no parameter shares memory with another one, or with a buffer.

    Raises:
        ModuleError: naming two that do.
    """
    parameters = set(module.parameters())
    for group in _group_by_memory(module):
        for (name, tensor), (other_name, other) in combinations(group, 2):
            counts = with_buffers or (tensor in parameters and other in parameters)
            if counts and _are_overlapping(tensor, other) and not parameters.isdisjoint((tensor, other)):
                raise ModuleError(
                    f"{name} and {other_name} of {type(module).__name__} are two tensors in the same memory, and "
                    f"strategy={strategy!r} keeps each by itself, so that they would no longer be equal; assign the "
                    "parameter itself (decoder.weight = encoder.weight, not its .data), or use strategy='ddp'."
                )


def _group_by_memory(module: nn.Module) -> list[list[tuple[str, Tensor]]]:
    """Return the tensors that lie in the same memory, with their names, in groups of two and more."""
    found: dict[tuple[object, ...], list[tuple[str, Tensor]]] = defaultdict(list)
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        is_special = nn.parameter.is_lazy(tensor) or is_dtensor(tensor) or is_traceable_wrapper_subclass(tensor)
        if is_special or tensor.is_meta or is_without_memory(tensor) or tensor.layout is not torch.strided:
            continue
        if tensor.numel():
            found[tensor.device, tensor.dtype, tensor.untyped_storage().data_ptr()].append((name, tensor))
    return [group for group in found.values() if len(group) > 1]


def _memory_extent(tensor: Tensor) -> int:
    """Return the number of elements from the first to the last one in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))


def _are_overlapping(one: Tensor, other: Tensor) -> bool:
    first, second = one.storage_offset(), other.storage_offset()
    return bool(first < second + _memory_extent(other) and second < first + _memory_extent(one))
