"""What each micro-batch of an optimizer step weighs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..strategies.errors import ModuleError
from .loss import Loss, as_tensor, mean_of, nonzero

Window = Sequence[tuple[Any, int]]
"""The micro-batches of one step, each with its number of samples."""


class Weights:
    """Weighs losses so that the gradient of a step is the mean over all its samples, however they are cut.

    With `Loss` the unit is whatever the user counts: the gradient is the sum of totals over the sum of counts. Those
    come only with the last micro-batch: gradients are first of totals over the first count, and corrected at the end.
    """

    _used = 0
    _first_count: Tensor | float | None = None
    _count: Tensor | float = 0.0

    def __init__(self, window: Window) -> None:
        self._window = window
        self.losses: list[Tensor] = []

    def weigh(self, loss: Tensor | Loss, size: int) -> Tensor:
        """Return the tensor whose gradient this micro-batch contributes.

        Raises:
            ModuleError: when the micro-batches of a window return tensors and `Loss` in turn.
        """
        if len(self._window) == 1:
            weighed = mean_of(loss)
        elif self.losses and isinstance(loss, Loss) == (self._first_count is None):
            raise ModuleError(
                f"training_step returned a {type(loss).__name__} after another kind of loss in the same step; "
                "return a Loss always, or never."
            )
        elif isinstance(loss, Loss):
            if self._first_count is None:
                self._first_count = nonzero(loss.count)
            self._count = self._count + loss.count
            weighed = loss.total / self._first_count
        else:
            self._used += size
            weighed = loss * (size / self._planned)
        self.losses.append(weighed)
        return weighed

    @property
    def _planned(self) -> int:
        return sum(size for _, size in self._window)

    def correction(self) -> Tensor | float | None:
        """Return by what all gradients have yet to be multiplied; None for nothing."""
        if len(self._window) == 1:
            return None
        if self._first_count is not None:
            like = self.losses[0]
            return as_tensor(self._first_count, like) / nonzero(as_tensor(self._count, like))
        return self._planned / self._used if self._used != self._planned else None

    def total(self) -> Tensor:
        """Return the loss of the step, detached."""
        total = torch.stack([loss.detach().reshape(()) for loss in self.losses]).sum()
        correction = self.correction()
        return total if correction is None else total * correction
