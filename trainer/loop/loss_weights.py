"""Weights of the micro-batches of an optimizer step, by samples or by the units of `Loss`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...common.errors import ModuleError
from ...strategies import Strategy
from ..data.micro_batch import Window
from ..module.loss import Loss, as_tensor, mean_of, nonzero


class Weights:
    """Weighs losses so that the gradient of a step is the mean over all its samples, however they are cut.

    With `Loss` the unit is whatever the user counts: the gradient is that of the sum of totals divided by the sum of
    counts. The latter is known only after the last micro-batch, so gradients are first divided by an estimate, and
    corrected at the end.

    Args:
        window: the micro-batches of this rank, with the samples of all ranks if there are several.
        strategy: the strategy if several ranks share a step; they average their gradients.
        is_whole: whether one loss is the whole step; by default, whether one micro-batch is.
    """

    __slots__ = (
        "_count",
        "_divisor",
        "_is_whole",
        "_planned",
        "_ranks",
        "_sharers",
        "_strategy",
        "_used",
        "came",
        "has_units",
        "losses",
    )

    def __init__(self, window: Window, strategy: Strategy | None = None, *, is_whole: bool | None = None) -> None:
        self._strategy = strategy
        self._planned = window.size if strategy is None else window.total_size
        self._is_whole = len(window) == 1 and strategy is None if is_whole is None else is_whole
        # tensors are weighted by the samples of their data rank, and each `Loss` by its share of all counts
        self._ranks = 1 if strategy is None else strategy.data_size
        self._sharers = 1 if strategy is None else strategy.ranks.loss.world_size
        self._used = 0
        # divides the totals until all counts are known
        self._divisor: Tensor | float = 1.0
        self._count: Tensor | float = 0.0
        self.came: int | None = None
        """The samples of all ranks that came, if a hook ended the window early and there are several ranks."""
        self.has_units = False
        """Whether the losses are `Loss`."""
        self.losses: list[Tensor] = []

    def weigh(self, loss: Tensor | Loss, size: int) -> Tensor:
        """Return the tensor whose gradient this micro-batch contributes.

        Raises:
            ModuleError: if some micro-batches of a window return tensors and others `Loss`.
        """
        if self._is_whole:
            weighed = mean_of(loss)
        elif self.losses and isinstance(loss, Loss) != self.has_units:
            raise ModuleError(
                f"training_step returned a {type(loss).__name__} after another kind of loss in the same step; "
                "return a Loss always, or never."
            )
        elif isinstance(loss, Loss):
            if not self.has_units:
                self.has_units = True
                # with several ranks, a number that is the same on all
                self._divisor = nonzero(loss.count) if self._strategy is None else self._planned / self._sharers
            self._count = self._count + loss.count
            weighed = loss.total / self._divisor
        else:
            self._used += size
            weighed = self.weigh_samples(loss, size)
        self.losses.append(weighed)
        return weighed

    def weigh_samples(self, loss: Tensor, size: int) -> Tensor:
        """Return the mean loss of `size` samples, weighted by their number."""
        weight = self._ranks * size / self._planned
        return loss if weight == 1.0 else loss * weight

    def correction(self, *, counts_units: bool) -> Tensor | float | None:
        """Return the factor by which to multiply all gradients; None for no change. Collective: every rank calls it.

        With `counts_units` the ranks return `Loss`, which a rank without samples cannot know by itself.
        """
        if self._is_whole:
            return None
        if not counts_units:
            # of a pipeline only the last stage has used any; with several ranks, no loss may be None
            used = self._used if self._ranks == 1 else self.came or 0
            return self._planned / used if used not in (0, self._planned) else None
        if self._strategy is None:
            like = self.losses[0]
            if like.device.type != "cpu" and not isinstance(self._count, Tensor):  # no wait for two numbers
                return self._divisor / nonzero(self._count)
            return as_tensor(self._divisor, like) / nonzero(as_tensor(self._count, like))
        like = self._like(self._strategy)
        if like.device.type != "cpu":
            # plain numbers are sent with gloo, alongside the device's work; tensor counts are only on the device
            is_tensor = isinstance(self._count, Tensor)
            numbers = [0.0 if is_tensor else float(self._count), float(is_tensor)]
            number, num_tensors = self._strategy.ranks.count.all_reduce(numbers)
            if not num_tensors:
                return float(self._planned / nonzero(number))
        count = self._strategy.ranks.count.all_reduce(as_tensor(self._count, like))
        return self._planned / nonzero(count)

    def _like(self, strategy: Strategy) -> Tensor:
        return self.losses[0] if self.losses else torch.zeros((), device=strategy.device)

    def total(self, *, counts_units: bool) -> Tensor:
        """Return the loss of the step, detached, for an optimizer that evaluates it itself. Collective.

        As in `correction`, with `counts_units` the ranks return `Loss`.
        """
        if self._strategy is None:
            total = torch.stack([loss.detach().reshape(()) for loss in self.losses]).sum()
        else:
            like = self._like(self._strategy)
            # in one dtype, also on a rank without a loss
            own = sum((as_tensor(loss, like) for loss in self.losses), as_tensor(0.0, like))
            total = self._strategy.ranks.count.all_reduce(own) / self._sharers
        correction = self.correction(counts_units=counts_units)
        return total if correction is None else total * correction
