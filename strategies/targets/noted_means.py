"""NotedMeans: the mean cross-entropies that a step computes without gradients, where no graph tells their targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..torch_internals.fake_tensors import is_without_memory
from .cross_entropy_call import CrossEntropyCall


class NotedMeans(TorchFunctionMode):
    """Notes what ``F.cross_entropy`` divides by: the number of targets, or the sum of their classes' weights."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[tuple[Tensor, Tensor]] = []

    def count_of(self, value: Tensor) -> Tensor | None:
        """Return what a mean was divided by; None for any other value."""
        if not self._found:
            return None
        address = value.data_ptr()
        return next((count for mean, count in self._found if mean is value or mean.data_ptr() == address), None)

    def __torch_function__(self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None) -> object:
        result = func(*args, **(kwargs or {}))
        if func is F.cross_entropy and not is_without_memory(result):
            call = CrossEntropyCall.of(args, kwargs or {})
            if call.reduction == "mean" and call.is_of_classes:
                self._found.append((result, call.weights().double().sum()))
        return result
