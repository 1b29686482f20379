"""What of a nested structure is reduced or gathered: its tensors and numbers; numbers travel as tensors of 64 bits."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from .nested import named_leaves, with_leaves
from .tensor_collectives import ReduceOp


class Reducible:
    """The tensors of a structure, in an order that all ranks share: a dictionary's keys may come in any.

    Args:
        data: the structure; leaves that are neither tensor nor number stay as they are.
        op: the reduction, where there is one.

    Raises:
        ConfigError: for the mean of an integer tensor.
    """

    def __init__(self, data: Any, op: ReduceOp | None = None) -> None:
        self._data = data
        self._op = op
        leaves = [(name, leaf) for name, leaf in named_leaves(data) if isinstance(leaf, Tensor | numbers.Real)]
        leaves.sort(key=lambda item: item[0])
        self.names = [name for name, _ in leaves]
        self._leaves = [leaf for _, leaf in leaves]
        self.tensors = [_as_tensor(name or "data", leaf, op) for name, leaf in leaves]

    def replaced(self, results: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Any:
        """Return the structure with other tensors, each of the given shape; numbers stay numbers in a reduction."""
        new: dict[str, Any] = {}
        for name, leaf, result, shape in zip(self.names, self._leaves, results, shapes, strict=True):
            tensor = result.reshape(tuple(shape))
            new[name] = tensor if isinstance(leaf, Tensor) or self._op is None else _as_number(tensor, leaf, self._op)
        return with_leaves(self._data, [new.get(name, leaf) for name, leaf in named_leaves(self._data)])


def _as_tensor(name: str, leaf: Any, op: ReduceOp | None) -> Tensor:
    if not isinstance(leaf, Tensor):
        is_exact = isinstance(leaf, numbers.Integral) and op != "mean"
        if is_exact and not -(2**63) <= leaf < 2**63:
            raise ConfigError(f"{name}={leaf} needs more than 64 bits; convert it to float first.")
        return torch.tensor(int(leaf) if is_exact else float(leaf), dtype=torch.int64 if is_exact else torch.float64)
    if op == "mean" and not (leaf.is_floating_point() or leaf.is_complex()):
        raise ConfigError(f"{name} is {leaf.dtype}, of which there is no exact mean; convert it to float first.")
    return leaf


def _as_number(tensor: Tensor, leaf: Any, op: ReduceOp) -> Any:
    number = tensor.item()
    return bool(number) if isinstance(leaf, bool) and op in ("min", "max") else number
