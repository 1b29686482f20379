"""CrossEntropyCall: the arguments of a call of ``F.cross_entropy``, and the weights of targets in its mean."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Self

import torch.nn.functional as F
from torch import Tensor

_SIGNATURE: Final = inspect.signature(F.cross_entropy)


@dataclass(frozen=True, slots=True)
class CrossEntropyCall:
    """The arguments of a call of ``F.cross_entropy``, by their names there."""

    input: Any
    target: Tensor
    weight: Tensor | None
    size_average: bool | None
    ignore_index: int
    reduce: bool | None
    reduction: str
    label_smoothing: float

    @classmethod
    def of(cls, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Self:
        """Return what a function that stands for ``F.cross_entropy`` was called with.

        Raises:
            TypeError: if it takes no such arguments.
        """
        call = _SIGNATURE.bind(*args, **kwargs)
        call.apply_defaults()
        return cls(**call.arguments)

    @property
    def is_of_classes(self) -> bool:
        """Whether targets are classes, not probabilities, and the reduction is given in today's way."""
        return not self.target.is_floating_point() and self.size_average is None and self.reduce is None

    def result(self) -> Tensor:
        """Return what ``F.cross_entropy`` returns."""
        return F.cross_entropy(*(getattr(self, field.name) for field in fields(self)))

    def weights(self) -> Tensor:
        """Return the weight of each target in the mean; the mean is a sum divided by their sum."""
        return weights_of_targets(self.target, self.ignore_index, self.weight)


def weights_of_targets(target: Tensor, ignore_index: int, class_weight: Tensor | None) -> Tensor:
    """Return whether each target counts, where classes have no weights, and the weight of its class otherwise."""
    counts = target != ignore_index
    return counts if class_weight is None else class_weight[target.where(counts, 0)] * counts
