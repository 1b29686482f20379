"""The training loop, in the order in which things happen."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, islice

from ...common.errors import DataError
from ...strategies.module.compiled_calls import warn_if_uncalled
from ..data.micro_batch import Window
from ..data.sample_checks import compare_first_reads
from ..session.session import Session
from .document_check import check_documents
from .evaluate import validate_in_fit
from .kept_results import KeptResults
from .remedies import EndlessEpoch, Untrained, raise_if_single_sample, tell_of_other_size, warn_without_targets
from .schedule import (
    amount_seen,
    counts_tokens,
    is_last_validation_due,
    is_over,
    is_validation_due,
    is_validation_due_at_epoch_end,
    plan_epoch,
    plan_log,
    reload_if_due,
    step_schedulers,
    step_schedulers_of_epochs,
    steps_by_epoch,
)
from .step import Step

Check = Callable[[], None]

_log = logging.getLogger(__name__)


def train(session: Session, step: Step, *, left_in_eval: Sequence[str] = (), after_first: Check | None = None) -> None:
    """Train until the epochs, steps or time are up, or a hook or a signal ends training.

    At every step boundary, in this order: update and schedulers, step metrics, validation if due; at the end of an
    epoch its hooks, metrics and the schedulers that need them; then, when all this is done, `on_train_step_end`, where
    checkpoints are saved.

    Args:
        session: the parts of the fit.
        step: the implementation of its steps.
        left_in_eval: the names of submodules in eval mode, of which to warn unless hooks have changed that.
        after_first: is called after the first step, whose optimizers have their state by then.
    """
    state, progress, timetable, hooks = session.state, session.progress, session.timetable, session.hooks
    writer, streams, replicas = session.writer, session.streams, session.replicas
    interruption, is_alone = session.interruption, not session.meetings.is_needed
    watch, kept, untrained = EndlessEpoch(session), KeptResults(session), Untrained(session)
    looks, size = kept.looks, state.global_batch_size
    firsts = [partial(kept.begin, left_in_eval), partial(tell_of_other_size, session, size)]
    checks = _checks_after_first(session, after_first)
    hooks.call("on_train_start")
    replicas.begin()
    while not is_over(session):
        _begin_epoch(session)
        while firsts:
            firsts.pop(0)()
        is_partial, goes_on, has_decays = False, True, steps_by_epoch(session)
        has_plateaus = any(config.reduce_on_plateau for config in session.schedulers)
        is_profiled, may_run_out = session.profiler.is_active, interruption.has_limit
        has_amount, logs_amount = session.settings.ends_by_amount, session.settings.log_amount is not None
        for window in _remaining_windows(session, checks):
            if logs_amount or state.global_step >= timetable.next_log:
                plan_log(session, window)
            try:
                goes_on = step.forward_backward(window)
                goes_on = step.update(window, goes_on=goes_on)
                untrained.has_loss |= step.has_gradients
            except ValueError as error:
                raise_if_single_sample(session, error)
                raise
            if has_decays and (not goes_on or step.first_batch_idx + window.length >= timetable.num_batches):
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
            if state.global_step >= timetable.next_log:
                _log_step(session)
                watch.look()
            if timetable.validates_inside and is_validation_due(session, num_micro_batches):
                validate_in_fit(session)
            if has_plateaus:
                step_schedulers(session, "step", state.global_step, with_metric=True)
            if is_profiled:
                session.profiler.step()
            if not goes_on or state.batches_in_epoch >= timetable.num_batches:
                break
            if writer.has_failed and is_alone:
                writer.raise_if_failed()
            for hook in hooks.on_train_step_end:
                hook()
            may_be_over = is_alone and (progress.should_stop or interruption.signal is not None or may_run_out)
            may_be_over |= has_amount and session.settings.is_used_up(state)
            if (may_be_over or state.global_step >= timetable.next_check) and is_over(session):
                is_partial = True
                _leave_epoch(session)
                break
        _end_epoch(session, untrained, is_partial=is_partial, validates=goes_on)
        kept.look_at_epoch()
        if not is_partial:
            hooks.call("on_train_step_end")
            if is_over(session):
                hooks.call("on_train_last_step")
        state.is_epoch_over = True
    _end_training(session)


def _end_cut_epoch(session: Session) -> None:
    """End the epoch inside of which training ended, in a run that goes on from the checkpoint that was saved there.

    Nothing tells whether the first run has done so: a kill may have come in between. Loggers leave out what they have.
    """
    _begin_epoch(session)
    _end_epoch(session, Untrained(session), is_partial=True, validates=False)
    session.state.is_epoch_over = True


def _end_training(session: Session) -> None:
    """Call the last hook of training, and send what it has logged to the loggers, unless a resumed run will."""
    if session.state.is_inside_epoch and not session.run.is_interrupted:
        _end_cut_epoch(session)
    session.writer.wait_for_copy()
    session.replicas.sync()  # under torchrun each rank keeps its own replica
    session.hooks.call("on_train_end")
    values = session.metrics.end_hooks()
    if not session.run.is_interrupted:
        session.log({line.reported: value for line, value in values})


def _begin_epoch(session: Session) -> None:
    """Begin the next epoch, or continue one that was resumed."""
    state, metrics, progress = session.state, session.metrics, session.progress
    session.writer.wait_for_copy()
    is_new = state.is_between_epochs
    state.begin_epoch()
    progress.go_to(state.batches_in_epoch)
    metrics.enter("train")
    metrics.guard.epoch = state.epoch
    if is_new:
        reload_if_due(session, "train")
    session.streams.begin_epoch(session.strategy, is_new=is_new)
    session.hooks.call("on_train_epoch_start")
    data = session.train_data
    assert data is not None
    data.recut(progress.accumulate_grad_batches)
    if not is_new and data.is_resumed(state.epoch):  # counted before hooks have set the micro-batches of a step
        state.go_to(data.count_resumed())
        progress.go_to(state.batches_in_epoch)
    state.global_batch_size = data.global_batch_size
    plan_epoch(session)
    if is_new:
        data.begin_epoch(state.epoch)
        session.streams.begin_steps(state.epoch)


def _checks_after_first(session: Session, check: Check | None) -> list[Check]:
    """Return what is to be checked after the first step."""
    checks = [] if check is None else [check]
    if session.settings.compile and not (session.strategy.rank or session.state.global_step):
        checks.append(partial(warn_if_uncalled, session.module))
    return checks


def _check_between_windows(check: Check) -> Iterator[Window]:
    """Call a check when the next window is asked for, and yield none: a chain then costs later windows nothing."""
    check()
    yield from ()


def _remaining_windows(session: Session, checks: list[Check]) -> Iterator[Window]:
    """Return the windows of the rest of the epoch; take the checks that follow the first.

    Raises:
        DataError: if a whole epoch is empty.
    """
    data, state = session.train_data, session.state
    assert data is not None
    windows = data.windows(state.batches_in_epoch)
    windows = compare_first_reads(windows, session.strategy, _first_batch, data.drawn, state.epoch)
    if counts_tokens(session):
        from ..sequences.token_windows import count_window_tokens, join_windows

        windows = count_window_tokens(windows, session.module.tokens_of, session.strategy)
        budget = session.settings.accumulate_tokens
        windows = windows if budget is None else join_windows(windows, budget)
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
            warn_without_targets(session, first)
    while checks:
        windows = chain(islice(windows, 1), _check_between_windows(checks.pop()), windows)
    return iter(session.profiler.measured("fetch", windows.__next__), None) if session.profiler.is_active else windows


def _first_batch(window: Window) -> object:
    return window[0].batch if window else None


def _leave_epoch(session: Session) -> None:
    """Do what is due when training ends inside an epoch."""
    if is_last_validation_due(session):
        validate_in_fit(session)
    session.hooks.call("on_train_last_step")


def _log_step(session: Session) -> None:
    assert session.train_data is not None
    of_data = session.train_data.step_metrics()
    session.log({**session.metrics.step_values(), **session.placed.step_metrics(), **of_data})


def _end_epoch(session: Session, untrained: Untrained, *, is_partial: bool, validates: bool) -> None:
    """Do everything due at the end of an epoch; if it was cut short, only report."""
    if not is_partial:
        untrained.look()
        _warn_if_unlogged(session)
    state, metrics = session.state, session.metrics
    if not is_partial:
        step_schedulers_of_epochs(session)  # of data whose end only reading tells
    if validates and not is_partial and is_validation_due_at_epoch_end(session):
        validate_in_fit(session)
    values = metrics.end_batches()
    if is_partial:
        metrics.set_aside()
    session.hooks.call("on_train_epoch_end")
    session.replicas.check()
    values += metrics.end_hooks()
    if not (is_partial and session.run.is_interrupted):  # the resumed run logs the whole epoch
        session.log({line.reported: value for line, value in values})
    if is_partial:
        metrics.restart_stage(None)  # `on_train_end` has nothing of it to log
        return
    step_schedulers(session, "epoch", state.epoch + 1, with_metric=True)
    state.is_epoch_done = True
    metrics.clear_stage()


def _warn_if_unlogged(session: Session) -> None:
    """Warn if the whole fit is shorter than the interval at which loggers get the values of steps."""
    state, settings, amount = session.state, session.settings, session.settings.log_amount
    is_last = state.epoch + 1 == settings.last_epoch or state.global_step == settings.last_step
    is_short = amount is not None and amount_seen(session, amount) < amount.number
    is_short |= 0 < state.global_step < settings.log_steps
    if not (is_last and is_short and session.loggers) or session.strategy.rank:
        return
    logged = list(session.metrics.batch_values())
    if logged:
        interval = f"once in {settings.log_every_n_steps}" if amount else f"of one step in {settings.log_steps} only"
        _log.warning(
            "The fit has %d steps, but loggers get the values %s, so none of %r; lower log_every_n_steps=%r.",
            *(state.global_step, interval, logged[0], settings.log_every_n_steps),
        )
