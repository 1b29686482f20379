"""One optimizer step: micro-batches forward and backward, clip, update, schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..strategies.errors import ConfigError, ModuleError
from .loss import Loss, as_tensor, loss_of, outputs_for_hooks
from .session import Session

Window = Sequence[tuple[Any, int]]
"""The micro-batches of one step, each with its number of samples."""


class Weights:
    """What each micro-batch of a window weighs, so that the step's gradient is the mean over all its samples.

    With `Loss` the unit is whatever the user counts: the gradient is the sum of totals over the sum of counts. Those
    come only with the last micro-batch: gradients are first of totals over the first count, and corrected at the end.
    """

    def __init__(self, window: Window) -> None:
        self._is_alone = len(window) == 1
        self._planned = sum(size for _, size in window)
        self._used = 0
        self._first_count: Tensor | float | None = None
        self._count: Tensor | float = 0.0
        self._losses: list[Tensor] = []

    def weigh(self, loss: Tensor | Loss, size: int) -> Tensor:
        """Return the tensor whose gradient this micro-batch contributes.

        Raises:
            ModuleError: when the micro-batches of a window return tensors and `Loss` in turn.
        """
        if (self._used or self._first_count is not None) and isinstance(loss, Loss) == (self._first_count is None):
            raise ModuleError(
                f"training_step returned a {type(loss).__name__} after another kind of loss in the same optimizer "
                "step; "
                "return a Loss always, or never."
            )
        if isinstance(loss, Loss):
            if self._first_count is None:
                self._first_count = loss.count
            self._count = self._count + loss.count
            weighed = loss.total / self._first_count
        else:
            self._used += size
            weighed = loss if self._is_alone else loss * (size / self._planned)
        self._losses.append(weighed)
        return weighed

    @property
    def is_empty(self) -> bool:
        """Whether every micro-batch was skipped."""
        return self._used == 0 and self._first_count is None

    def correction(self) -> Tensor | float | None:
        """Return by what all gradients have yet to be multiplied; None for nothing."""
        if self._is_alone:
            return None
        if self._first_count is not None:
            like = self._losses[0]
            return as_tensor(self._first_count, like) / as_tensor(self._count, like)
        return self._planned / self._used if self._used != self._planned else None

    def total(self) -> Tensor:
        """Return the loss of the step, detached."""
        total = torch.stack([loss.detach().reshape(()) for loss in self._losses]).sum()
        correction = self.correction()
        return total if correction is None else total * correction


def take_step(session: Session, window: Window) -> bool:
    """Train on the micro-batches of one optimizer step; return False when a hook asked to end the epoch.

    The order is Lightning's: batch start, forward, zero_grad (before the first backward), backward, and with the last
    micro-batch clip, update and schedulers; batch end.
    """
    strategy, metrics, hooks, state = session.strategy, session.metrics, session.hooks, session.state
    weights = Weights(window)
    metrics.position = state.global_step + 1
    goes_on = True
    last = len(window) - 1
    for index, (batch, size) in enumerate(window):
        metrics.in_batch, metrics.batch_size = True, size
        batch_idx = session.batch_idx = state.batches_in_epoch
        if session.transfer is not None:
            batch = session.transfer(batch, 0)
        for hook in hooks["on_train_batch_start"]:
            goes_on = hook(batch, batch_idx) != -1 and goes_on
        if goes_on:
            if not session.module.automatic_optimization:
                session.writer.settle()
            with strategy.accumulating(index == last):
                with session.profiler.record("training_step"):
                    output = strategy.run(
                        "training_step", *((batch, batch_idx) if session.takes_batch_idx else (batch,))
                    )
                if session.module.automatic_optimization:
                    loss = loss_of(output)
                    if index == 0:
                        zero_gradients(session, batch_idx)
                    if loss is not None:
                        run_backward(session, weights.weigh(loss, size))
        elif index == 0:
            break
        if index == last or not goes_on:
            _finish(session, window, weights, batch_idx)
        if not goes_on:
            break
        state.batches_in_epoch += 1
        state.batches_seen += 1
        state.samples_seen += size
        if hooks["on_train_batch_end"]:
            outputs = outputs_for_hooks(output)
            for hook in hooks["on_train_batch_end"]:
                hook(outputs, batch, batch_idx)
    metrics.in_batch = False
    return goes_on


def zero_gradients(session: Session, batch_idx: int) -> None:
    """Drop the gradients of the step before."""
    for optimizer in session.optimizers:
        for hook in session.hooks["on_before_zero_grad"]:
            hook(optimizer)
        session.module.optimizer_zero_grad(session.state.epoch, batch_idx, optimizer)


def run_backward(session: Session, loss: Tensor) -> None:
    """Add the gradients of one micro-batch."""
    for hook in session.hooks["on_before_backward"]:
        hook(loss)
    with session.profiler.record("backward"):
        if session.overrides_backward:
            session.module.backward(session.strategy.scaled(loss))
        else:
            session.strategy.backward(loss)
    for hook in session.hooks["on_after_backward"]:
        hook()


def _finish(session: Session, window: Window, weights: Weights, batch_idx: int) -> None:
    """Update the parameters with the gradients of a window, and count the step."""
    state = session.state
    if not session.module.automatic_optimization:
        state.global_step += 1
        return
    if weights.is_empty:
        return
    correction = weights.correction()
    if correction is not None:
        session.strategy.scale_gradients(correction)
    session.writer.settle()  # a checkpoint may still be copying what changes now
    with session.profiler.record("optimizer_step"):
        closure = _closure(session, window, weights) if session.passes_closure else None
        has_updated = _update(session, closure, batch_idx)
    state.global_step += 1
    if has_updated:
        step_schedulers(session, "step", state.global_step)
    else:
        state.skipped_steps += 1


def _update(session: Session, closure: Callable[[], Tensor] | None, batch_idx: int) -> bool:
    """Clip and step every optimizer; return False when scaled gradients overflowed and an update was left out."""
    settings, strategy = session.settings, session.strategy
    for index, optimizer in enumerate(session.optimizers):
        strategy.unscale(optimizer)
        for hook in session.hooks["on_before_optimizer_step"]:
            hook(optimizer)
        if session.clips:
            session.module.configure_gradient_clipping(
                optimizer, settings.gradient_clip_val, settings.gradient_clip_algorithm
            )
        if session.overrides_optimizer_step:
            managed: Any = session.managed_optimizers[index]
            session.module.optimizer_step(session.state.epoch, batch_idx, managed, closure)
        else:
            _step_optimizer(session, index, closure)
    return strategy.end_step()


def _step_optimizer(session: Session, index: int, closure: Callable[[], Any] | None) -> None:
    """Update the parameters of one optimizer, and count it; a closure that it does not need is called before."""
    if closure is not None and not session.needs_closure[index]:
        closure()
        closure = None
    session.strategy.step(session.optimizers[index], closure)
    session.state.optimizer_steps[index] += 1


def managed_step(session: Session, index: int) -> Callable[[Callable[[], Any] | None], None]:
    """Return what ``step`` of an optimizer means that the user's module holds."""

    def step(closure: Callable[[], Any] | None) -> None:
        if session.module.automatic_optimization:
            _step_optimizer(session, index, closure)
            return
        optimizer = session.optimizers[index]
        if closure is not None and not session.needs_closure[index]:
            closure()  # before the gradients are unscaled
            closure = None
        session.strategy.unscale(optimizer)
        for hook in session.hooks["on_before_optimizer_step"]:
            hook(optimizer)
        _step_optimizer(session, index, closure)
        if not session.strategy.end_step():
            session.state.skipped_steps += 1

    return step


def _closure(session: Session, window: Window, weights: Weights) -> Callable[[], Tensor]:
    """Return what an optimizer may call for the loss: first the one computed already, then anew."""
    computed = [weights.total()]

    def closure() -> Tensor:
        return computed.pop() if computed else _compute_again(session, window)

    return closure


def _compute_again(session: Session, window: Window) -> Tensor:
    """Compute the loss and the gradients of a window at the parameters as they are now."""
    weights = Weights(window)
    for optimizer in session.optimizers:
        optimizer.zero_grad()
    for index, (batch, size) in enumerate(window):
        batch = batch if session.transfer is None else session.transfer(batch, 0)
        with session.strategy.accumulating(index == len(window) - 1):
            loss = loss_of(
                session.strategy.run("training_step", *((batch, session.batch_idx)[: 1 + session.takes_batch_idx]))
            )
            if loss is not None:
                session.strategy.backward(weights.weigh(loss, size))
    correction = weights.correction()
    if correction is not None:
        session.strategy.scale_gradients(correction)
    return weights.total()


def step_schedulers(session: Session, interval: str, count: int, *, with_metric: bool = False) -> None:
    """Step the schedulers of an interval (``step`` or ``epoch``) whose frequency divides the count.

    Those with a metric are stepped apart, `with_metric`, when it has been computed.

    Raises:
        ConfigError: when a metric that a scheduler monitors strictly was never logged.
    """
    for config in session.schedulers:
        if config.interval != interval or config.reduce_on_plateau != with_metric or count % config.frequency:
            continue
        metric = session.metrics.callback_metrics().get(config.monitor) if config.monitor is not None else None
        if with_metric and metric is None:
            if config.strict:
                known = sorted(session.metrics.callback_metrics())
                raise ConfigError(
                    f"A scheduler monitors {config.monitor!r}, which was not logged; logged were {known}. "
                    "Log it, choose one of those, or set strict=False."
                )
            continue
        session.module.lr_scheduler_step(config.scheduler, metric)
