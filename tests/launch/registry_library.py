"""A library whose layers leave something in mappings when they are made, and read it when they are called."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

BY_NAME: dict[str, Any] = {}
BY_CLASS: dict[type, float] = {}
BY_OBJECT: weakref.WeakKeyDictionary[nn.Module, float] = weakref.WeakKeyDictionary()
SEEN: weakref.WeakSet[nn.Module] = weakref.WeakSet()
ACTIVATIONS: dict[str, Any] = {"relu": torch.relu}
"""To which programs add their own."""


class Registry:
    """A class that holds a mapping."""

    known: ClassVar[dict[str, float]] = {}


class Layer(nn.Module):
    """A linear layer with a factor from each of the mappings, which is 0 without its entry."""

    scale: ClassVar[float | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        type(self).scale = 0.5
        BY_NAME[str(type(self))] = {"factor": 1.5}
        BY_CLASS[type(self)] = 2.0
        BY_OBJECT[self] = 3.0
        SEEN.add(self)
        Registry.known[type(self).__name__] = 4.0

    def forward(self, x: Tensor) -> Tensor:
        factor = BY_NAME.get(str(type(self)), {"factor": 0.0})["factor"] * BY_CLASS.get(type(self), 0.0)
        factor *= BY_OBJECT.get(self, 0.0) * Registry.known.get("Layer", 0.0) * (self in SEEN) * (self.scale or 0.0)
        out: Tensor = ACTIVATIONS["own"](self.linear(x)) * factor
        return out
