"""The training loop, in the order in which things happen."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from typing import Any

from torch import nn

from ...common.errors import ConfigError, DataError
from ...strategies.module.compiled_calls import warn_if_uncalled
from ...strategies.torch_tensors import version_of
from ..data.micro_batch import Window
from ..data.sample_checks import compared
from ..session.session import Session
from ..session.token_windows import counted, joined
from .document_check import check_documents
from .eval_mode import warn_of_eval_mode
from .evaluate import validate
from .kept_results import KeptResults
from .pipeline_step import PipelineStep
from .remedies import EndlessEpoch, raise_if_single_sample, tell_of_other_size
from .schedule import (
    counts_tokens,
    is_last_validation_due,
    is_over,
    is_used_up,
    is_validation_due,
    is_validation_due_at_epoch_end,
    plan_epoch,
    reload_if_due,
    step_schedulers,
    step_schedulers_of_epochs,
    steps_by_epoch,
)
from .shared_step import SharedStep
from .step import OneRankStep, Step

_log = logging.getLogger(__name__)


def make_step(session: Session) -> Step:
    """Return the implementation of the optimizer step for this run."""
    if session.placed.ranks.stage.world_size > 1:
        if session.settings.accumulate_tokens is not None:
            raise ConfigError(
                "A pipeline has the same number of micro-batches in each step, got accumulate_tokens="
                f"{session.settings.accumulate_tokens}; use accumulate_grad_batches, or a strategy without stages."
            )
        return PipelineStep(session)
    return SharedStep(session) if session.placed.ranks.count.world_size > 1 else OneRankStep(session)


def train(session: Session, step: Step) -> None:
    """Train until the epochs, steps or time are up, or a hook or a signal ends training.

    At every step boundary, in this order: update and schedulers, step metrics, validation if due; at the end of an
    epoch its hooks, metrics and the schedulers that need them; then, when all this is done, `on_train_step_end`, where
    checkpoints are saved.
    """
    state, progress, hooks, writer = session.state, session.progress, session.hooks, session.writer
    interruption, is_alone, replicas = session.interruption, not session.meetings.is_needed, session.replicas
    streams = session.streams
    watch, kept = EndlessEpoch(session), KeptResults(session)
    looks, saved_size = kept.looks, state.global_batch_size
    progress.first_version = _version_of(session.module)
    hooks.call("on_train_start")
    replicas.begin()
    while not is_over(session):
        _begin_epoch(session)
        if progress.left_in_eval:
            warn_of_eval_mode(session)
        if saved_size is not None:  # a resumed run, in its first epoch
            tell_of_other_size(session, saved_size)
            saved_size = None
        is_partial, goes_on = False, True
        has_decays = steps_by_epoch(session)
        has_plateaus = any(config.reduce_on_plateau for config in session.schedulers)
        is_profiled, may_run_out = session.profiler.is_active, interruption.has_limit
        has_amount = session.settings.ends_by_amount
        for window in _windows(session):
            try:
                goes_on = step.forward_backward(window)
                goes_on = step.update(window, goes_on=goes_on)
            except ValueError as error:
                raise_if_single_sample(session, error)
                raise
            if has_decays and (not goes_on or step.first_batch_idx + window.length >= progress.num_batches):
                step_schedulers_of_epochs(session)
            progress.is_in_step = False
            num_micro_batches = step.finish(window, goes_on=goes_on)
            state.tokens_seen += window.tokens if goes_on else 0
            if streams.is_open:
                streams.settle(session.strategy, state.global_step)
            if looks:
                looks = kept.look()
            if state.global_step >= replicas.next_step:
                replicas.check()
            if state.global_step >= progress.next_log:
                _log_step(session)
                watch.look()
            if progress.validates_inside and is_validation_due(session, num_micro_batches):
                validate(session)
            if has_plateaus:
                step_schedulers(session, "step", state.global_step, with_metric=True)
            if is_profiled:
                session.profiler.step()
            if not goes_on or state.batches_in_epoch >= progress.num_batches:
                break
            if writer.has_failed and is_alone:
                writer.raise_if_failed()
            for hook in hooks.on_train_step_end:
                hook()
            may_be_over = is_alone and (progress.should_stop or interruption.signal is not None or may_run_out)
            may_be_over |= has_amount and is_used_up(session)
            if (may_be_over or state.global_step >= progress.next_check) and is_over(session):
                is_partial = True
                _leave_epoch(session)
                break
        _end_epoch(session, is_partial=is_partial, validates=goes_on)
        kept.look_at_epoch()
        if not is_partial:
            hooks.call("on_train_step_end")
            if is_over(session):
                hooks.call("on_train_last_step")
        state.is_epoch_over = True
    writer.wait_for_copy()
    session.replicas.sync()  # under torchrun each rank keeps its own replica
    hooks.call("on_train_end")


def _begin_epoch(session: Session) -> None:
    """Begin the next epoch, or continue one that was resumed."""
    state, metrics, progress = session.state, session.metrics, session.progress
    session.writer.wait_for_copy()
    is_new = state.is_epoch_done or state.batches_in_epoch == 0
    state.begin_epoch()
    progress.batch_idx = state.batches_in_epoch
    metrics.enter("train")
    metrics.guard.epoch = state.epoch
    if is_new:
        reload_if_due(session, "train")
    session.streams.begin_epoch(session.strategy, is_new=is_new)
    session.hooks.call("on_train_epoch_start")
    data = session.train_data
    assert data is not None
    data.recut(progress.accumulate_grad_batches)
    state.global_batch_size = data.global_batch_size
    plan_epoch(session)
    if is_new:
        data.begin_epoch(state.epoch)
        session.streams.begin_steps(state.epoch)


def _checked(check: Callable[[], None]) -> Iterator[Window]:
    """Call a check when the next window is asked for, and yield none: a chain then costs later windows nothing."""
    check()
    yield from ()


def _windows(session: Session) -> Iterator[Window]:
    """Return the windows of the rest of the epoch.

    Raises:
        DataError: if a whole epoch is empty.
    """
    data, state = session.train_data, session.state
    assert data is not None
    windows = data.windows(state.batches_in_epoch)
    windows = compared(windows, session.strategy, _first_batch, data.drawn, state.epoch)
    if counts_tokens(session):
        windows = counted(windows, session.module.tokens_of, session.strategy)
        budget = session.settings.accumulate_tokens
        windows = windows if budget is None else joined(windows, budget)
    if state.batches_in_epoch == 0:
        first = next(windows, None)
        if first is None:
            raise DataError(
                f"The training loader gave no batch in epoch {state.epoch}; if it can be read only once, set "
                "max_epochs=1, or pass one that begins again with each iter()."
            )
        windows = chain([first], windows)
        if state.global_step == 0:
            check_documents(session, first)
    if session.settings.compile and not (session.strategy.rank or state.global_step):
        windows = chain(islice(windows, 1), _checked(partial(warn_if_uncalled, session.module)), windows)
    if session.check_savable is not None:
        windows = chain(islice(windows, 1), _checked(session.check_savable), windows)
        session.check_savable = None
    return iter(session.profiler.measured("fetch", windows.__next__), None) if session.profiler.is_active else windows


def _first_batch(window: Window) -> Any:
    return window[0].batch if window else None


def _leave_epoch(session: Session) -> None:
    """Do what is due when training ends inside an epoch."""
    if is_last_validation_due(session):
        validate(session)
    session.hooks.call("on_train_last_step")


def _log_step(session: Session) -> None:
    assert session.train_data is not None
    of_data = session.train_data.step_metrics()
    session.log({**session.metrics.step_values(), **session.placed.step_metrics(), **of_data})
    session.progress.next_log += session.settings.log_every_n_steps


def _end_epoch(session: Session, *, is_partial: bool, validates: bool) -> None:
    """Do everything due at the end of an epoch; if it was cut short, only report."""
    if not is_partial:
        _warn_if_untrained(session)
        _warn_if_unlogged(session)
    state, metrics = session.state, session.metrics
    if not is_partial:
        step_schedulers_of_epochs(session)  # of data whose end only reading tells
    if validates and not is_partial and is_validation_due_at_epoch_end(session):
        validate(session)
    values = metrics.end_batches()
    session.hooks.call("on_train_epoch_end")
    session.replicas.check()
    values += metrics.end_hooks()
    if not (is_partial and session.run.is_interrupted):  # the resumed run will log the whole epoch
        session.log({line.reported: value for line, value in values})
    if is_partial:
        return
    step_schedulers(session, "epoch", state.epoch + 1, with_metric=True)
    state.is_epoch_done = True
    metrics.clear_stage()


def _warn_if_unlogged(session: Session) -> None:
    """Warn if the whole fit is shorter than the interval at which loggers get the values of steps."""
    state, settings = session.state, session.settings
    is_last = state.epoch + 1 == settings.last_epoch or state.global_step == settings.last_step
    is_short = 0 < state.global_step < settings.log_every_n_steps
    if not (is_last and is_short and session.loggers) or session.strategy.rank:
        return
    logged = list(session.metrics.batch_values())
    if logged:
        _log.warning(
            "The fit has %d steps, but loggers get the values of every %dth only, so none of %r; lower "
            "log_every_n_steps=%d.",
            *(state.global_step, settings.log_every_n_steps, logged[0], settings.log_every_n_steps),
        )


def _version_of(module: nn.Module) -> int:
    """Return a number that grows with each in-place change of a parameter, whichever optimizer makes it."""
    return sum(map(version_of, module.parameters()))


def _warn_if_untrained(session: Session) -> None:
    """Warn if no batch so far had a loss, or if no optimizer was stepped in manual optimization."""
    state = session.state
    is_manual = not session.module.automatic_optimization
    has_stepped = any(state.optimizer_steps) or session.progress.first_version != _version_of(session.module)
    if is_manual and session.optimizers and state.epoch == 0 and not has_stepped:
        warnings.warn(
            f"{type(session.module).__name__}.automatic_optimization is False, and no optimizer has stepped in the "
            f"{state.batches_in_epoch} batches of epoch 0; call self.manual_backward(loss) and "
            "self.optimizers().step() in training_step, or leave automatic_optimization out.",
            stacklevel=2,
        )
    if state.global_step == session.progress.steps_without_loss and state.batches_in_epoch > 0 and session.optimizers:
        warnings.warn(
            f"training_step returned None for all {state.batches_in_epoch} batches of epoch {state.epoch}, and nothing "
            "was trained; return the loss (is `return` missing?).",
            stacklevel=2,
        )
