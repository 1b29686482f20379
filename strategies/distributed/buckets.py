"""Buckets that join the tensors of nested structures, so that many tensors need few collectives."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from ...common.errors import ConfigError
from .nested import named_leaves, with_leaves
from .tensor_collectives import ReduceOp

# Joining saves the latency of a collective per tensor and costs a copy: cheap for small tensors, as in DDP's buckets
_MAX_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Bucket:
    """Tensors joined into a flat one."""

    indices: list[int]
    widths: list[int]
    flat: Tensor

    def split(self, flat: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the index and the columns of each tensor; `flat` has one or more rows, each with all tensors."""
        rows = flat.reshape(-1, sum(self.widths))
        for index, columns in zip(self.indices, rows.split(self.widths, dim=1), strict=True):
            # cloned, because saving a view would save the whole bucket
            yield index, columns.clone() if len(self.indices) > 1 else columns


def join_in_buckets(tensors: Sequence[Tensor], num_rows: int = 1, *, by_gradient: bool = False) -> Iterator[Bucket]:
    """Copy tensors into buckets: small ones of the same dtype and device type together, each large one alone.

    Args:
        tensors: tensors of any shapes.
        num_rows: the number of equal slices into which every tensor is cut; a bucket has the first slice of each
            tensor, then the second of each, and so on.
        by_gradient: whether to separate tensors that require a gradient; only valid if all ranks agree on which do.
    """
    groups: dict[object, list[int]] = {}
    for index, tensor in enumerate(tensors):
        key = (tensor.dtype, tensor.device.type, by_gradient and tensor.requires_grad)
        is_large = tensor.numel() * tensor.element_size() > _MAX_BYTES
        groups.setdefault((*key, index if is_large else None), []).append(index)
    for indices in groups.values():
        widths = [tensors[index].numel() // num_rows for index in indices]
        rows = [tensors[index].reshape(num_rows, width) for index, width in zip(indices, widths, strict=True)]
        yield Bucket(indices, widths, torch.cat(rows, dim=1).reshape(-1))


def map_joined(
    tensors: Sequence[Tensor], function: Callable[[Tensor], Tensor], num_rows: int = 1, *, by_gradient: bool = False
) -> list[Tensor]:
    """Return each tensor's columns of ``function(bucket)``, which may overwrite the bucket; see `join_in_buckets`."""
    results = list(tensors)
    for bucket in join_in_buckets(tensors, num_rows, by_gradient=by_gradient):
        if bucket.flat.numel():
            for index, columns in bucket.split(function(bucket.flat)):
                results[index] = columns
    return results


class Reducible:
    """Tensors and numbers of a structure, sorted by name, since the order of dictionary keys may differ between ranks.

    Numbers become 64-bit tensors; other leaves are left in place.

    Args:
        data: the structure.
        op: the reduction, if there is one.

    Raises:
        ConfigError: for the mean of an integer tensor, and for an integer of more than 64 bits.
    """

    def __init__(self, data: object, op: ReduceOp | None = None) -> None:
        self._data = data
        self._op = op
        leaves = [(name, leaf) for name, leaf in named_leaves(data) if isinstance(leaf, Tensor | numbers.Real)]
        self._leaves = dict(sorted(leaves, key=lambda item: item[0]))
        self.names = list(self._leaves)
        self.tensors = [_to_tensor(name or "data", leaf, op) for name, leaf in self._leaves.items()]

    def replaced(self, results: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> object:
        """Return the structure with new tensors, each in the given shape; a reduced number becomes a number again."""
        new: dict[str, object] = {}
        for (name, leaf), result, shape in zip(self._leaves.items(), results, shapes, strict=True):
            tensor = result.reshape(tuple(shape))
            new[name] = tensor if isinstance(leaf, Tensor) or self._op is None else _to_number(tensor, leaf, self._op)
        return with_leaves(self._data, [new.get(name, leaf) for name, leaf in named_leaves(self._data)])


def _to_tensor(name: str, leaf: Any, op: ReduceOp | None) -> Tensor:
    if not isinstance(leaf, Tensor):
        is_exact = isinstance(leaf, numbers.Integral) and op != "mean"
        if is_exact and not -(2**63) <= leaf < 2**63:
            raise ConfigError(f"{name}={leaf} must fit into 64 bits; convert it to float first.")
        return torch.tensor(int(leaf) if is_exact else float(leaf), dtype=torch.int64 if is_exact else torch.float64)
    if op == "mean" and not (leaf.is_floating_point() or leaf.is_complex()):
        raise ConfigError(f"{name} must be a floating point tensor for op='mean', got {leaf.dtype}; convert it first.")
    return leaf


def _to_number(tensor: Tensor, leaf: object, op: ReduceOp) -> object:
    number = tensor.item()
    return bool(number) if isinstance(leaf, bool) and op in ("min", "max") else number
