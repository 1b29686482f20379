"""LearningRateCurve: losses at increasing learning rates, the rate that they suggest, and their plot."""

from __future__ import annotations

import importlib
import logging
import math
from typing import Any, Final, Literal

import torch

from ...common.errors import RunError
from .trials import new_axes

_log = logging.getLogger(__name__)

Mode = Literal["exponential", "linear"]

FORGETTING: Final = 0.98
"""The factor by which a loss's weight in the running mean decreases with each step."""

WINDOW: Final = 0.2
"""The fraction of the rates over which a slope is taken. Between neighbors, as in Lightning, there is more noise than
slope: on six small tasks that misses the good rates in four, this way in one."""


class LearningRateCurve:
    """The results of a search for the learning rate.

    Source: Smith, "Cyclical Learning Rates for Training Neural Networks", 2017 (the range test).

    Args:
        mode: how the rates grow from the first to the last.
        lr_min: the first rate.
        lr_max: the last rate.
        num_training: the number of rates, including the first and the last.
    """

    def __init__(self, mode: Mode, lr_min: float, lr_max: float, num_training: int) -> None:
        self.mode, self.lr_min, self.lr_max, self.num_training = mode, lr_min, lr_max, num_training
        self.results: dict[str, list[float]] = {"lr": [], "loss": []}
        """The rates tried, and the loss at each: a weighted mean of all losses so far, newer ones counting more."""
        self._mean = 0.0

    def rate(self, index: int) -> float:
        """Return the rate with this number, from 0."""
        fraction = index / (self.num_training - 1)
        if self.mode == "linear":
            return self.lr_min + fraction * (self.lr_max - self.lr_min)
        return float(self.lr_min * (self.lr_max / self.lr_min) ** fraction)

    def add(self, loss: float | None) -> None:
        """Add the loss of the next rate; None if its step had none, which leaves the mean as it is."""
        number = len(self.results["loss"])
        self.results["lr"].append(self.rate(number))
        if loss is None:
            self.results["loss"].append(math.nan)
            return
        self._mean = FORGETTING * self._mean + (1 - FORGETTING) * loss
        self.results["loss"].append(self._mean / (1 - FORGETTING ** (number + 1)))

    def has_diverged(self, threshold: float) -> bool:
        """Return whether the newest loss is not finite, or `threshold` times the smallest one."""
        *before, newest = self.results["loss"]
        if not math.isfinite(newest):
            return True
        best = min(before, default=newest)
        return newest - best > (threshold - 1) * abs(best)  # also for a negative loss

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Return the rate at which the loss falls most steeply, over the logarithm of the rate in exponential mode.

        The slope is that of a line fitted to a fifth of the rates (least squares).

        Args:
            skip_begin: the number of first rates to leave out, where the mean covers few losses.
            skip_end: the number of last rates to leave out, where the loss may have begun to grow.

        Returns:
            The rate; None, with a log message, if fewer than 2 finite losses are left.
        """
        index = self._steepest(skip_begin, skip_end)
        if index is None:
            _log.error(
                "Failed to compute suggestion for learning rate: fewer than 2 of %d losses are left without %d at "
                "the beginning and %d at the end; raise num_training_steps or early_stop_threshold, or lower max_lr.",
                *(len(self.results["loss"]), skip_begin, skip_end),
            )
            return None
        return self.results["lr"][index]

    def _steepest(self, skip_begin: int = 10, skip_end: int = 1) -> int | None:
        losses = self.results["loss"]
        finite = [i for i in range(skip_begin, len(losses) - skip_end) if math.isfinite(losses[i])]
        if len(finite) < 2:
            return None
        places = torch.tensor([self.results["lr"][index] for index in finite], dtype=torch.float64)
        if self.mode == "exponential":
            places = places.log()
        width = min(len(finite), max(2, round(WINDOW * self.num_training)))
        at = places.unfold(0, width, 1)
        at = at - at.mean(1, keepdim=True)
        values = torch.tensor([losses[index] for index in finite], dtype=torch.float64).unfold(0, width, 1)
        slopes = (at * values).sum(1) / at.square().sum(1)
        return finite[int(slopes.argmin()) + width // 2]

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """Plot the losses over the rates, and return the figure.

        Args:
            suggest: mark the suggested rate.
            show: open a window with it.
            ax: the Matplotlib axes to draw on; by default those of a new figure.

        Raises:
            MissingDependencyError: if Matplotlib is not installed.
            RunError: if no rate was tried.
        """
        rates, losses = self.results["lr"], self.results["loss"]
        if not rates:
            raise RunError(
                "A learning rate curve to plot needs results, found none; call fit with LearningRateFinder first."
            )
        if ax is None:
            ax = new_axes()
        ax.plot(rates, losses)
        self._keep_in_view(ax)
        if self.mode == "exponential":
            ax.set_xscale("log")
        ax.set_xlabel("learning rate")
        ax.set_ylabel("loss")
        index = self._steepest() if suggest else None
        if index is not None:
            ax.plot(
                rates[index], losses[index], "o", color="red", markersize=10, label=f"suggested: {rates[index]:.3g}"
            )
            ax.legend(frameon=False)
        if show:
            importlib.import_module("matplotlib.pyplot").show()
        return ax.figure

    def _keep_in_view(self, ax: Any) -> None:
        """Cut the last loss off, where it has diverged: it would press all others into a flat line."""
        *before, newest = [loss for loss in self.results["loss"] if math.isfinite(loss)] or [math.nan]
        low, high = min(before, default=math.nan), max(before, default=math.nan)
        if newest - high > high - low > 0:
            room = 0.1 * (high - low)
            ax.set_ylim(low - room, high + 2 * room)

    def state_dict(self) -> dict[str, Any]:
        """Return the arguments and the results."""
        arguments = {"mode": self.mode, "lr_min": self.lr_min, "lr_max": self.lr_max, "num_training": self.num_training}
        return {"arguments": arguments, "results": {name: list(values) for name, values in self.results.items()}}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> LearningRateCurve:
        """Return the curve whose `state_dict` this is."""
        curve = cls(**state["arguments"])
        curve.results = {name: list(values) for name, values in state["results"].items()}
        return curve
