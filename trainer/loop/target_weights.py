"""TargetWeights: the losses of a run that are weighted by their targets, and one warning for those that cannot be."""

from __future__ import annotations

import warnings
from math import inf, log2
from typing import Final

from torch import Tensor

from ...common.errors import ModuleError
from ...strategies import Strategy
from ...strategies.targets.target_mean import TargetMean, target_mean_of, target_means_in

_MOST_LOOKS: Final = 64
_MOST_READS: Final = 8
"""The losses whose parts are looked at, and those of an accelerator, which each reading waits for."""


class TargetWeights:
    """Finds the mean cross-entropies among the losses of a run.

    A tensor that is the mean over the targets of a micro-batch, and nothing else, weighs as many samples as it has
    targets. For other losses with such a mean inside, it warns once if the targets of a sample differ.

    Args:
        reason: why no loss is weighted so, for the warning; None if they are.
        is_shown: whether this rank warns.
    """

    __slots__ = ("_is_shown", "_looks_left", "_reason", "ratio", "scale")

    def __init__(self, reason: str | None = None, *, is_shown: bool = True) -> None:
        self._reason, self._is_shown = reason, is_shown
        self._looks_left = _MOST_LOOKS
        self.ratio: float | None = None
        """The targets of a sample in the first loss that has some and is not weighted by them."""
        self.scale = 1.0
        """The targets of a sample in the last step whose losses are weighted by them, to the nearest power of two."""

    @classmethod
    def of(cls, strategy: Strategy) -> TargetWeights:
        """Return those of a run; ranks whose steps are their own exchange no counts."""
        is_own = strategy.steps_alone or strategy.max_lead > 0
        reason = f"the ranks of strategy={strategy.name!r} exchange nothing before they step" if is_own else None
        return cls(reason, is_shown=not strategy.rank)

    def give_up(self, reason: str) -> None:
        """Weight no loss by its targets from now on, for a reason that a warning says."""
        self._reason = reason

    def mean_of(self, loss: Tensor, size: int) -> TargetMean | None:
        """Return what a micro-batch of `size` samples is weighted by; None for its samples."""
        if type(loss) is not Tensor:
            return None
        mean = target_mean_of(loss)
        if mean is not None and self._reason is None:
            return mean
        if self._looks_left and size:
            self._looks_left -= 1
            means = target_means_in(loss) if mean is None else [mean]
            if means:
                self._compare(loss, sum(float(each.count) for each in means) / size)
        return None

    def note_number(self, number: float) -> None:
        """Take note of how many targets a sample had in a step: gradients of the next are of the right size at once."""
        if 0 < number < inf:
            self.scale = 2.0 ** round(log2(number))

    def compare_ranks(self, ratios: list[float]) -> None:
        """Warn if ranks had different numbers of targets in a sample, in losses that are not weighted by them."""
        if ratios and _differ_clearly(min(ratios), max(ratios)):
            self._warn(min(ratios), max(ratios))

    def _compare(self, loss: Tensor, ratio: float) -> None:
        if loss.device.type != "cpu":
            self._looks_left = min(self._looks_left, _MOST_READS)
        if self.ratio is None:
            self.ratio = ratio
        elif _differ_clearly(self.ratio, ratio):
            self._warn(self.ratio, ratio)

    def _warn(self, one: float, other: float) -> None:
        if not (self._is_shown and self._looks_left):
            return
        self._looks_left = 0
        warnings.warn(
            f"The loss is a cross-entropy over {one:.4g} targets a sample in one micro-batch and {other:.4g} in another"
            f", but micro-batches weigh by their samples, since "
            f"{self._reason or 'it has other terms or a factor beside that mean'}: the step is not that of one batch. "
            "Use echelon.Loss(total, count) instead, with the sum over all targets and their number.",
            stacklevel=2,
        )


def _differ_clearly(one: float, other: float) -> bool:
    return abs(one - other) > 1e-6 * max(abs(one), abs(other))


def cannot_mix() -> ModuleError:
    """Return the error for a step some of whose losses are means over targets, with several of them a sample."""
    return ModuleError(
        "training_step returned a mean over target tokens and, in the same optimizer step, a tensor that is none, "
        "whose weight among tokens is unknown; return Loss(total, count) for both, and Loss(0 * loss, 0) for a batch "
        "that should not count."
    )
