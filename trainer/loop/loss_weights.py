"""Weights of the micro-batches of an optimizer step, by samples, by targets or by the units of `Loss`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ...common.errors import ModuleError
from ...strategies import Strategy
from ...strategies.targets.shares import share_of, unclear_share
from ...strategies.targets.target_mean import TargetMean
from ..module.loss import Loss, as_tensor, avoid_zero, mean_of
from .target_weights import TargetWeights, cannot_mix

if TYPE_CHECKING:
    from ...strategies.parallel.step_caller import BeginSum

Unit = Literal["samples", "targets", "Loss"]
"""What the losses of a step are weighted by; with targets, a tensor that has none still weighs by its samples."""


class Weights:
    """Weighs losses so that the gradient of a step is the mean over all its samples, however they are cut.

    With `Loss` the unit is whatever the user counts: the gradient is that of the sum of totals divided by the sum of
    counts. The latter is known only after the last micro-batch, so gradients are first divided by an estimate, and
    corrected at the end. So it is with a tensor that is the mean over its targets: the unit is the target.

    Args:
        planned: the samples of the step, on all ranks that share it.
        num_losses: the micro-batches of this rank, each of which has a loss.
        strategy: the strategy if several ranks share a step; they average their gradients.
        targets: finds the losses that are means over targets; None to weigh all tensors by samples.
        is_whole: whether one loss is the whole step; by default, whether one micro-batch is.
        begin_early: begins to add up the targets of all ranks before the last backward, where all ranks have as many
            losses, and weigh them by targets; None to add up what counts behind it.
    """

    __slots__ = (
        "_begin_early",
        "_begins_at",
        "_begun",
        "_count",
        "_divisor",
        "_expected",
        "_has_many",
        "_has_parts",
        "_is_whole",
        "_planned",
        "_ranks",
        "_sharers",
        "_strategy",
        "_targets",
        "_used",
        "_without_targets",
        "came",
        "has_targets",
        "has_units",
        "losses",
    )

    def __init__(
        self,
        planned: int,
        num_losses: int,
        strategy: Strategy | None = None,
        targets: TargetWeights | None = None,
        *,
        is_whole: bool | None = None,
        begin_early: BeginSum | None = None,
    ) -> None:
        self._strategy, self._targets = strategy, targets
        self._planned = planned
        # targets that need no correction; the factor is a power of two, which rounds nothing otherwise
        self._expected = planned if targets is None else planned * targets.scale
        self._is_whole = num_losses == 1 and strategy is None if is_whole is None else is_whole
        # tensors are weighted by the samples of their data rank, and each `Loss` by its share of all counts
        self._ranks = 1 if strategy is None else strategy.data_size
        self._sharers = 1 if strategy is None else strategy.ranks.loss.world_size
        self._has_parts = self._sharers > self._ranks
        """Whether ranks have parts of the same samples, and maybe different numbers of their tokens."""
        self._used = 0
        # divides the totals until all counts are known
        self._divisor: Tensor | float = 1.0
        self._count: Tensor | float = 0.0
        self.came: int | None = None
        """The samples of all ranks that came, if a hook ended the window early and there are several ranks."""
        self.has_units = False
        """Whether the losses are `Loss`."""
        self.has_targets = self._has_many = False
        """Whether there are means over targets, and any with several targets a sample."""
        self._without_targets: list[tuple[Tensor, float]] = []
        """The weighted tensors that are no means over targets, and their samples."""
        self.losses: list[Tensor] = []
        self._begins_at, self._begin_early = num_losses, begin_early
        self._begun: Callable[[], list[float]] | None = None

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
                self._divisor = avoid_zero(loss.count) if self._strategy is None else self._planned / self._sharers
            if self._has_parts and not share_of(loss.total):  # another rank has computed the whole
                loss = Loss(loss.total * 0.0, loss.count * 0)
            self._count = self._count + loss.count
            weighed = loss.total / self._divisor
        else:
            self._used += size
            share = share_of(loss) if self._has_parts else 1.0
            mean = None if self._targets is None else self._targets.mean_of(loss, size)
            if mean is None:
                if share is None:
                    raise unclear_share("The loss", "return Loss(total, count)")
                weighed = self.weigh_samples(loss, size * share)
                self._without_targets.append((weighed, size * share))
            else:
                weighed = self._weigh_targets(loss, mean, size if share is None or share else 0)
        self.losses.append(weighed)
        if self._begin_early is not None and len(self.losses) == self._begins_at and weighed.device.type == "cpu":
            self._begun = self._begin_early(self._numbers())
        return weighed

    @property
    def unit(self) -> Unit:
        """What the losses of this rank are weighted by."""
        return "Loss" if self.has_units else "targets" if self.has_targets else "samples"

    def weigh_samples(self, loss: Tensor, size: float) -> Tensor:
        """Return the mean loss of `size` samples, weighted by their number."""
        weight = self._ranks * size / self._expected
        return loss if weight == 1.0 else loss * weight

    def _weigh_targets(self, loss: Tensor, mean: TargetMean, size: int) -> Tensor:
        """Return a mean over targets, weighted by their number as by as many samples; without targets, 0.

        A `size` of 0 stands for none: another rank has computed the whole.
        """
        self.has_targets, self._has_many = True, self._has_many or mean.number > size
        if loss.device.type == "cpu":
            number = mean.count.item() if size else 0
            self._count = self._count + number
            if not number:  # the mean is not a number, but nothing flows back from it
                return loss.nan_to_num(nan=0.0) * 0.0
            weight = self._sharers * number / self._expected
            return loss if weight == 1.0 else loss * weight
        count = mean.count.to(torch.float32) * float(size > 0)
        self._count = self._count + as_tensor(count, loss)
        return torch.where(count > 0, loss, 0.0) * (count * (self._sharers / self._expected))

    def correction(self, unit: Unit) -> Tensor | float | None:
        """Return the factor by which to multiply all gradients; None for no change. Collective: every rank calls it.

        `unit` is that of all ranks, which a rank without samples cannot know by itself.

        Raises:
            ModuleError: if means over many targets meet tensors without targets.
        """
        if self._is_whole:
            return None
        if unit == "samples":
            # of a pipeline only the last stage has used any; with several ranks, no loss may be None
            used = (self._used if self._ranks == 1 else self.came) or self._planned
            return None if used == self._expected else self._expected / used
        if self._begun is not None:
            return self._correction_of(self._begun())
        count = self._count + self._of_samples()
        if self._strategy is None:
            return self._correction_alone(count, unit)
        like, planned = self._like(self._strategy), self._planned if unit == "Loss" else self._expected
        if like.device.type != "cpu":
            # plain numbers are sent with gloo, alongside the device's work; tensor counts are only on the device
            is_tensor = isinstance(count, Tensor)
            numbers = [0.0 if is_tensor else float(count), float(is_tensor)]
            number, num_tensors = self._strategy.ranks.count.all_reduce(numbers)
            if not num_tensors:
                return float(planned / avoid_zero(number))
        elif unit == "targets":
            return self._correction_of(self._strategy.ranks.count.begin_all_reduce(self._numbers(), "sum")())
        count = self._strategy.ranks.count.all_reduce(as_tensor(count, like))
        return planned / avoid_zero(count)

    def _of_samples(self) -> float:
        """Return what the tensors without targets count.

        Raises:
            ModuleError: if others are means over many targets.
        """
        own = self._without_zeros() * self._ranks / self._sharers
        if own and self._has_many:
            raise cannot_mix()
        return own

    def _numbers(self) -> list[float]:
        """Return what the losses of this rank count, which is added up over all."""
        own = self._of_samples()
        return [float(self._count + own), own, float(self._has_many)]

    def _correction_of(self, sums: list[float]) -> float | None:
        number, others, has_many = sums
        if others and has_many:
            raise cannot_mix()
        return self._correction_by(number)

    def _correction_by(self, number: float) -> float | None:
        if self._targets is not None and self.came is None:
            self._targets.note_number(number / self._planned)
        return None if number == self._expected else self._expected / (number or 1.0)

    def _correction_alone(self, count: Tensor | float, unit: Unit) -> Tensor | float | None:
        like = self.losses[0]
        if unit == "targets":
            return self._expected / avoid_zero(count) if isinstance(count, Tensor) else self._correction_by(count)
        if like.device.type != "cpu" and not isinstance(count, Tensor):  # no wait for two numbers
            return self._divisor / avoid_zero(count)
        return as_tensor(self._divisor, like) / avoid_zero(as_tensor(count, like))

    def _without_zeros(self) -> float:
        """Return the samples of the tensors that are no means over targets; one that is 0 stands for none."""
        return sum(size for loss, size in self._without_targets if loss.item())

    def _like(self, strategy: Strategy) -> Tensor:
        return self.losses[0] if self.losses else torch.zeros((), device=strategy.device)

    def total(self, unit: Unit) -> Tensor:
        """Return the loss of the step, detached, for an optimizer that evaluates it itself. Collective.

        As in `correction`, `unit` is that of all ranks.
        """
        if self._strategy is None:
            total = torch.stack([loss.detach().reshape(()) for loss in self.losses]).sum()
        else:
            like = self._like(self._strategy)
            # in one dtype, also on a rank without a loss
            own = sum((as_tensor(loss, like) for loss in self.losses), as_tensor(0.0, like))
            total = self._strategy.ranks.count.all_reduce(own) / self._sharers
        correction = self.correction(unit)
        return total if correction is None else total * correction
