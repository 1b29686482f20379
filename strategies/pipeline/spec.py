"""Specs: the shapes of the tensors passed from stage to stage, and the batches for which they are known."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ..distributed.nested import map_tensors, named_leaves

_MOST_KNOWN: Final = 512


class Spec:
    """The shape and dtype of a tensor, and whether it has a gradient."""

    __slots__ = ("dtype", "requires_grad", "shape")

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.requires_grad = tensor.requires_grad

    def empty(self, device: torch.device) -> Tensor:
        """Return a tensor to receive into."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def filled(self, value: float, device: torch.device) -> Tensor:
        """Return a tensor filled with one value."""
        return torch.full(self.shape, value, dtype=self.dtype, device=device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spec) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{'' if self.requires_grad else ' no grad'}"


def specs_of(data: object) -> object:
    """Return a structure with specs in place of its tensors."""
    return map_tensors(Spec, data)  # type: ignore[arg-type]


def with_tensors(specs: object, tensors: list[Tensor]) -> object:
    """Return a structure with tensors, in its order, in place of its specs."""
    left = iter(tensors)
    return map_tensors(_return_unchanged, specs, lambda leaf: next(left) if isinstance(leaf, Spec) else leaf)


def flatten_specs(specs: object) -> list[Spec]:
    """Return the specs of a structure, in order."""
    return [leaf for _, leaf in named_leaves(specs) if isinstance(leaf, Spec)]


def _return_unchanged(tensor: Tensor) -> Tensor:
    return tensor


class Shapes(NamedTuple):
    """What a stage knows about the stages before it, for batches of one signature."""

    received: object
    """What it receives, with specs in place of tensors; None on the first stage."""
    parts: dict[str, list[object]]
    """What the parts of earlier stages return, for each of their calls."""


class KnownShapes:
    """Shapes by the signature of a batch; the most recent ones, the same on all ranks that see the same batches."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, dict[int, Shapes]] = OrderedDict()

    def of(self, signature: Hashable) -> dict[int, Shapes]:
        """Return the shapes for each stage of this rank; empty for a signature that is new."""
        shapes = self._known.setdefault(signature, {})
        self._known.move_to_end(signature)
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        return shapes

    def clear(self) -> None:
        """Forget all shapes."""
        self._known.clear()

    def __len__(self) -> int:
        return len(self._known)


def signature_of(step_name: str, batch: object) -> Hashable:
    """Return a key that differs for batches with different shapes, or with different numbers, which may be lengths."""
    leaves = tuple(
        (name, str(leaf.dtype), tuple(leaf.shape)) if isinstance(leaf, Tensor) else (name, _simplify_leaf(leaf))
        for name, leaf in named_leaves(batch)
    )
    return step_name, torch.is_grad_enabled(), leaves


def _simplify_leaf(leaf: object) -> object:
    return leaf if isinstance(leaf, bool | int) or leaf is None else type(leaf).__name__
