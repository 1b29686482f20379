"""InPlaceOfLogits: what a layer that computes logits is asked to return in their place, such as their loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn

_ATTRIBUTE: Final = "_in_place_of_logits"


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of the logits that this rank computes, of those that are cut over a group of ranks."""

    group: Any
    """A `TensorGroup`."""
    start: int
    stop: int
    num_classes: int
    """Those of all ranks."""


@dataclass(slots=True)
class InPlaceOfLogits:
    """A request to a linear layer, which stands in the layer while it is called."""

    answer: Callable[[Tensor, Tensor, Tensor | None, Columns | None], Tensor]
    """Returns a number for the layer's input, weight and bias; the columns are all, or those of this rank."""
    is_paused: bool = False

    def compute(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, columns: Columns | None = None) -> Tensor:
        """Return the number, for which logits of some tokens may be computed by the same functions."""
        with self.paused():
            return self.answer(hidden, weight, bias, columns)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the layer compute logits inside the block."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before


def asked_of(layer: nn.Module) -> InPlaceOfLogits | None:
    """Return what a layer is asked to return in place of logits; None if it is to compute them."""
    asked: InPlaceOfLogits | None = vars(layer).get(_ATTRIBUTE)
    return None if asked is None or asked.is_paused else asked


@contextmanager
def asking_layer(layer: nn.Module, asked: InPlaceOfLogits) -> Iterator[None]:
    """Ask a layer inside the block."""
    vars(layer)[_ATTRIBUTE] = asked
    try:
        yield
    finally:
        del vars(layer)[_ATTRIBUTE]
