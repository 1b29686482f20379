"""Closure: the loss and the gradients of a window, computed when ``optimizer_step`` or an optimizer asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ...common.errors import ModuleError
from ...strategies.placed.placed import Placed
from ..data.micro_batch import Window
from ..module.optimizers import ManagedOptimizer
from ..module.train_module import TrainModule
from ..session.train_state import TrainState
from .loss_weights import Unit, Weights


class ClosedStep(Protocol):
    """What a closure needs of a step."""

    module: TrainModule
    placed: Placed
    state: TrainState
    managed_optimizers: Sequence[ManagedOptimizer]
    first_batch_idx: int
    left: Callable[[], bool | None] | None
    weights: Weights | None
    has_gradients: bool
    is_updating: bool

    def make_weights(self, window: Window) -> Weights:
        """Return the weights of a window's losses."""

    def run_again(self, window: Window) -> None:
        """Compute the gradients of a window with the current parameters."""

    def complete(self, window: Window) -> None:
        """Complete the gradients of a window once its micro-batches have run. Collective with several ranks."""

    def unit_of(self, weights: Weights) -> Unit:
        """Return what the losses of the step are weighted by. Collective with several ranks."""


class Closure:
    """A function that returns the loss of a window, detached, and leaves its gradients. Collective on several ranks.

    The first call runs what is left of the window: its last micro-batch, or all of them in a pipeline and where ranks
    have different numbers. A later one, as of LBFGS, computes the whole window again with the current parameters. Each
    further optimizer steps with the gradients that are there, so its first call computes nothing.
    """

    __slots__ = ("_is_fresh", "_loss", "_step", "_window", "goes_on", "has_run")

    def __init__(self, step: ClosedStep, window: Window) -> None:
        self._step, self._window = step, window
        self._loss: Tensor | None = None
        self._is_fresh = False
        self.has_run, self.goes_on = False, True
        """Whether it was called in this step, and whether no hook inside has ended the epoch."""

    def begin_optimizer(self) -> None:
        """Begin the step of the next optimizer."""
        self._is_fresh = self.has_run

    def __call__(self) -> Tensor | None:
        if self._is_fresh:
            self._is_fresh = False
            return self._loss
        step, self.has_run = self._step, True
        before, step.is_updating = step.is_updating, False  # the forward is no update
        with torch.enable_grad():
            self._compute()
        step.is_updating = before
        return self._loss

    def _compute(self) -> None:
        step, window = self._step, self._window
        if step.left is None:
            step.weights, step.has_gradients = step.make_weights(window), False
            step.run_again(window)
        else:
            run, step.left = step.left, None
            self.goes_on = run() is not False
        step.complete(window)
        weights = step.weights
        assert weights is not None
        is_none = not weights.losses and not step.has_gradients
        self._loss = None if is_none else weights.total(step.unit_of(weights))


def update_in_closure(step: ClosedStep, window: Window) -> tuple[bool, bool]:
    """Let the module step each optimizer with a closure; return whether all were updated, and the epoch goes on.

    An update is skipped if its scaled gradients overflowed.

    Raises:
        ModuleError: if nothing called the closure.
    """
    if step.left is None:  # a hook has ended the epoch, and the micro-batches before have run
        step.left = _run_nothing
    closure = Closure(step, window)
    batch_idx = step.first_batch_idx + window.length - 1  # the same on ranks with fewer micro-batches
    for optimizer in step.managed_optimizers:
        closure.begin_optimizer()
        step.is_updating = True
        managed: Any = optimizer
        step.module.optimizer_step(step.state.epoch, batch_idx, managed, closure)
        step.is_updating = False
    if not closure.has_run:
        raise ModuleError(
            f"The closure hasn't been executed: {type(step.module).__name__}.optimizer_step did not call "
            f"optimizer_closure in batch {batch_idx}, so training_step has not run; call "
            "optimizer.step(closure=optimizer_closure), or optimizer_closure() alone "
            "to leave the update out."
        )
    return step.placed.end_step(), closure.goes_on


def _run_nothing() -> None:
    pass
