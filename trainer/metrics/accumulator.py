"""Accumulator: the values of one metric, folded into a sum and a weight every 256 values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import torch
from torch import Tensor

from ...strategies.devices.abilities import widest_float
from ...strategies.devices.streams import numbers_on, pins_memory

Reduce = Literal["mean", "sum", "min", "max"] | Callable[[Tensor], Tensor]
REDUCTIONS: Final = ("mean", "sum", "min", "max")

_FOLD_EVERY: Final = 256


class Accumulator:
    """Values and their weights, reduced by mean (weighted), sum, min, max, or a function of them all, in float64.

    Adding a value costs an append; a mean divides once, at the end, so that the mean of a constant is that constant.
    """

    __slots__ = ("_total", "_values", "_weight", "_weights", "reduce")

    def __init__(self, reduce: Reduce) -> None:
        self.reduce = reduce
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._values: list[Tensor | float] = []
        self._weights: list[float] = []
        self._total: Tensor | None = None
        self._weight = 0.0

    def copy(self) -> Accumulator:
        """Return another accumulator of what was added so far."""
        other = Accumulator(self.reduce)
        if not self.is_empty:
            total, weight = self.partial()
            other.load_state_dict({"total": total, "weight": weight})
        return other

    def restart(self, value: Tensor | float, weight: float) -> None:
        """Forget everything, and add a value."""
        self._values, self._weights, self._total, self._weight = [value], [weight], None, 0.0

    def add(self, value: Tensor | float, weight: float) -> None:
        """Add a value; a tensor must not change afterwards."""
        self._values.append(value)
        self._weights.append(weight)
        if len(self._values) >= _FOLD_EVERY:
            self._fold()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added."""
        return self._total is None and not self._values

    def partial(self) -> tuple[Tensor, float]:
        """Return this rank's (weighted) total and weight; for a function, the values themselves."""
        self._fold()
        assert self._total is not None
        return self._total, self._weight

    def result(self, total: Tensor, weight: float | Tensor) -> Tensor:
        """Return the reduced value from totals and weights, of this rank or of all ranks."""
        if callable(self.reduce):
            return self.reduce(total)
        return total / weight if self.reduce == "mean" else total

    def value(self) -> Tensor:
        """Return the reduced value of this rank."""
        return self.result(*self.partial())

    def newest(self) -> Tensor | float:
        """Return `value`, but as a number, without using torch, if there is only one number."""
        if self._total is not None or len(self._values) != 1 or callable(self.reduce):
            return self.value()
        (value,), (weight,) = self._values, self._weights
        if isinstance(value, Tensor) or not weight:
            return self.value()
        return value * weight / weight if self.reduce == "mean" else float(value)

    def state_dict(self) -> dict[str, object]:
        """Return everything added so far."""
        total, weight = self.partial()
        return {"total": total.cpu(), "weight": weight}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.clear()
        self._total, self._weight = state_dict["total"], state_dict["weight"]

    def _fold(self) -> None:
        if not self._values:
            return
        values = _stack_values(self._values)
        if self.reduce == "mean":
            if not all(self._weights):  # a mean over nothing is not a number, and counts nothing
                values = torch.where(numbers_on(values.device, self._weights, values.dtype) > 0, values, 0.0)
            folded = torch.dot(values, numbers_on(values.device, self._weights, values.dtype))
        elif callable(self.reduce):
            folded = values
        else:
            folded = getattr(values, self.reduce)()
        self._total = folded if self._total is None else self._merge(self._total.to(folded.device), folded)
        self._weight += sum(self._weights)
        self._values, self._weights = [], []

    def _merge(self, old: Tensor, new: Tensor) -> Tensor:
        if callable(self.reduce):
            return torch.cat([old, new])
        if self.reduce in ("mean", "sum"):
            return old + new
        return torch.minimum(old, new) if self.reduce == "min" else torch.maximum(old, new)


def _stack_values(values: list[Tensor | float]) -> Tensor:
    device = next((value.device for value in values if isinstance(value, Tensor)), torch.device("cpu"))
    dtype = widest_float(device)
    if not any(isinstance(value, Tensor) for value in values):
        return torch.tensor(values, dtype=dtype)
    if pins_memory(device):
        values = [value if isinstance(value, Tensor) else numbers_on(device, [value], dtype) for value in values]
    return torch.stack([torch.as_tensor(value, device=device).reshape(()).to(dtype) for value in values])


def to_numbers(values: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Return numbers and scalar tensors as Python numbers, waiting for the device once."""
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    if len({(tensor.device, tensor.dtype) for tensor in tensors.values()}) > 1:
        read = [tensor.item() for tensor in tensors.values()]
    else:
        read = torch.stack(list(tensors.values())).tolist() if tensors else []
    numbers: dict[str, Any] = {**values, **dict(zip(tensors, read, strict=True))}
    return numbers
