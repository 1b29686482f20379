"""One optimizer step: micro-batches forward and backward, clip, update, schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...strategies.errors import ConfigError
from ..data.window import Window
from ..module.loss import loss_of, mean_of, outputs_for_hooks
from ..session.session import Session
from .distributed_step import (
    backward_without_samples,
    catch_up,
    count_shared,
    counts_units,
    make_weights,
    meet_early,
    refuse_to_skip,
    run_spare_batch,
)
from .loss_weights import Weights


def take_steps(session: Session, windows: Iterable[Window]) -> Iterator[int]:
    """Train on the micro-batches of one optimizer step after another; yield after each how many they were.

    0 says that a hook asked to end the epoch. The order is Lightning's: batch start, forward, zero_grad (before the
    first backward), backward, and with the last micro-batch clip, update and schedulers; batch end. A generator, since
    what a step reads lies in its frame: looking it up anew costs the step of a small model 2%.
    """
    metrics, hooks, state, writer = session.metrics, session.hooks, session.state, session.writer
    transfer, forward, backward, zero_grads = session.transfer, session.forward, session.backward, session.zero_grads
    is_automatic, passes_closure, is_shared = session.is_automatic, session.passes_closure, session.is_shared
    is_collective = is_shared and session.strategy.forward_is_collective
    on_batch_start, on_batch_end = hooks.on_train_batch_start, hooks.on_train_batch_end
    goes_on = True
    for window in windows:
        last = len(window) - 1
        weights = make_weights(session, window) if last or passes_closure or is_shared else None
        metrics.position = state.global_step + 1
        has_gradients = False
        has_begun = is_collective and catch_up(session, window)
        for index, (batch, size) in enumerate(window):
            metrics.in_batch, metrics.batch_size = True, size
            batch_idx = session.batch_idx = state.batches_in_epoch
            if transfer is not None:
                batch = transfer(batch, 0)
            for hook in on_batch_start:
                goes_on = hook(batch, batch_idx) != -1 and goes_on
            if goes_on:
                if last or is_shared:
                    session.strategy.set_grad_sync(index == last)
                if writer.is_copying and not is_automatic:
                    writer.wait_for_copy()  # the step itself changes what a checkpoint is copying
                output = forward(batch, batch_idx)
                if is_automatic:
                    # nearly always the loss itself, known without a call
                    is_plain = type(output) is Tensor and output.requires_grad and output.ndim == 0
                    loss = output if is_plain else loss_of(output)
                    if index == 0 and not has_begun:
                        for zero_grad in zero_grads:
                            zero_grad()
                    if loss is not None:
                        has_gradients = True
                        if weights is not None:
                            loss = weights.weigh(loss, size)
                        backward(loss if is_plain else mean_of(loss))
                    elif is_shared:
                        refuse_to_skip(session)
            if index == last or not goes_on:
                if has_gradients:
                    if is_shared and not goes_on:
                        meet_early(session)
                    update(session, weights, window)
                elif goes_on and not is_automatic:
                    end_manual_update(session)
                    state.global_step += 1
            if not goes_on:
                break
            state.batches_in_epoch = batch_idx + 1
            state.samples_seen += size
            if on_batch_end:
                outputs = outputs_for_hooks(output)
                for hook in on_batch_end:
                    hook(outputs, batch, batch_idx)
        if is_shared and goes_on:
            if not window:
                _step_without_samples(session, has_begun=has_begun)
            last = count_shared(session, window) - 1
        metrics.in_batch, metrics.position = False, state.global_step
        yield last + 1 if goes_on else 0


def _step_without_samples(session: Session, *, has_begun: bool) -> None:
    """Take part in a step of the other ranks for which this one has no samples."""
    if session.is_automatic:
        backward_without_samples(session, is_first=not has_begun)
        update(session, make_weights(session, ()), ())
    else:
        run_spare_batch(session)
        end_manual_update(session)
        session.state.global_step += 1


def update(session: Session, weights: Weights | None, window: Window) -> None:
    """Update the parameters with the gradients of a window, and count the step."""
    state, closure = session.state, None
    if weights is not None:
        correction = weights.correction(counts_units=counts_units(session, weights))
        if correction is not None:
            session.strategy.scale_gradients(correction)
        if session.passes_closure:
            closure = _closure(session, window, weights)
    if session.writer.is_copying:
        session.writer.wait_for_copy()  # a checkpoint is copying what changes now
    has_updated = True
    if session.updates_directly:
        for index, updater in enumerate(session.updaters):
            updater.step()
            state.optimizer_steps[index] += 1
    else:
        has_updated = _update_each(session, closure)
    state.global_step += 1
    if not has_updated:
        state.skipped_steps += 1
    elif session.schedulers:
        step_schedulers(session, "step", state.global_step)


def _update_each(session: Session, closure: Callable[[], Any] | None) -> bool:
    """Unscale, clip and step each optimizer; return False when scaled gradients overflowed and one was left out."""
    for index, optimizer in enumerate(session.optimizers):
        session.strategy.unscale(optimizer)
        for hook in session.hooks.on_before_optimizer_step:
            hook(optimizer)
        if session.clips:
            limit, algorithm = session.settings.gradient_clip_val, session.settings.gradient_clip_algorithm
            session.module.configure_gradient_clipping(optimizer, limit, algorithm)
        if session.overrides_optimizer_step:
            managed: Any = session.managed_optimizers[index]
            session.module.optimizer_step(session.state.epoch, session.batch_idx, managed, closure)
        else:
            session.updaters[index].step(closure if session.needs_closure[index] else None)
            session.state.optimizer_steps[index] += 1
    return session.strategy.end_step()


def managed_step(session: Session, index: int) -> Callable[[Callable[[], Any] | None], None]:
    """Return what ``step`` of an optimizer means that the user's module holds."""

    def step(closure: Callable[[], Any] | None) -> None:
        if closure is not None and not session.needs_closure[index]:
            closure()
            closure = None
        is_manual = not session.module.automatic_optimization
        if is_manual:
            session.strategy.unscale(session.optimizers[index])
            for hook in session.hooks.on_before_optimizer_step:
                hook(session.optimizers[index])
        session.updaters[index].step(closure)
        session.state.optimizer_steps[index] += 1
        if is_manual:
            session.has_stepped = True
            torch.clear_autocast_cache()  # it holds the weights in half precision as they were before

    return step


def manual_backward(session: Session, loss: Tensor, *args: Any, **kwargs: Any) -> None:
    """Add gradients as `training_step` asks in manual optimization."""
    end_manual_update(session)
    session.backward(loss if session.loss_weight == 1.0 else loss * session.loss_weight, *args, **kwargs)


def end_manual_update(session: Session) -> None:
    """Adapt the loss scale, not before all optimizers have stepped whose gradients were computed with it."""
    if session.has_stepped:
        session.has_stepped = False
        session.state.skipped_steps += not session.strategy.end_step()


def _closure(session: Session, window: Window, weights: Weights) -> Callable[[], Tensor]:
    """Return what an optimizer may call for the loss: first the one computed already, then anew."""
    computed = [weights.total()]

    def closure() -> Tensor:
        return computed.pop() if computed else _compute_again(session, window)

    return closure


def _compute_again(session: Session, window: Window) -> Tensor:
    """Compute the loss and the gradients of a window at the parameters as they are now."""
    weights = make_weights(session, window)
    has_begun = session.strategy.forward_is_collective and session.is_shared and catch_up(session, window)
    if not window:
        backward_without_samples(session, is_first=not has_begun)
    elif not has_begun:
        for optimizer in session.optimizers:
            optimizer.zero_grad()
    for index, (batch, size) in enumerate(window):
        batch = batch if session.transfer is None else session.transfer(batch, 0)
        if len(window) > 1:
            session.strategy.set_grad_sync(index == len(window) - 1)
        loss = loss_of(session.forward(batch, session.batch_idx))
        if loss is not None:
            session.strategy.backward(weights.weigh(loss, size))
    correction = weights.correction(counts_units=counts_units(session, weights))
    if correction is not None:
        session.strategy.scale_gradients(correction)
    return weights.total()


def step_schedulers(session: Session, interval: str, count: int, *, with_metric: bool = False) -> None:
    """Step the schedulers of an interval (``step`` or ``epoch``) whose frequency divides the count.

    Those with a metric are stepped apart, `with_metric`, when it has been computed. In manual optimization the module
    steps them all.

    Raises:
        ConfigError: when a metric that a scheduler monitors strictly was never logged.
    """
    for config in session.schedulers if session.module.automatic_optimization else ():
        if config.interval != interval or config.reduce_on_plateau != with_metric or count % config.frequency:
            continue
        if with_metric:
            session.metrics.reduce()  # a step's value, of all ranks
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
