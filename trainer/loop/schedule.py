"""Schedule of a run: when it ends, logs, validates, reloads its loaders and steps its learning rate schedulers."""

from __future__ import annotations

import math
from fractions import Fraction

from ...common.durations import Amount
from ...common.errors import ConfigError
from ..data.micro_batch import Window
from ..data.train_data import TrainData
from ..session.progress import LoaderKind
from ..session.session import Session


def plan_epoch(session: Session) -> None:
    """Work out when the epoch logs and validates, and how long it is."""
    data, settings, timetable = session.train_data, session.settings, session.timetable
    assert data is not None
    timetable.num_batches = data.num_batches
    plan_log(session)
    timetable.validates_inside = has_validation(session) and validates_in_this_epoch(session)
    interval = settings.val_check_interval
    _plan_amount(session)
    if not isinstance(interval, int | float):
        interval = math.inf
    elif isinstance(interval, float):
        planned = data.planned_batches
        interval = math.inf if interval == 1.0 or math.isinf(planned) else int(planned * interval)
    timetable.validation_interval = max(1, interval)


def plan_log(session: Session, window: Window | None = None) -> None:
    """Note the next step of which the loggers get the values, when the step on this window, or an epoch, begins."""
    state, timetable = session.state, session.timetable
    every, amount = session.settings.log_steps, session.settings.log_amount
    timetable.next_log = (state.global_step // every + 1) * every if every else math.inf
    if amount is not None and window is not None:
        seen, size = amount_seen(session, amount), window.total_size or window.size
        size = window.tokens if amount.unit == "tokens" else size
        if amount.is_reached(seen, seen + size):
            timetable.next_log = state.global_step + 1


def note_validated(session: Session) -> None:
    """Note that the run has validated at this step, and have ranks meet: callbacks may have asked to end training.

    Collective: every rank calls it.
    """
    session.timetable.validated_at = session.timetable.next_check = session.state.global_step
    _plan_amount(session)
    if session.settings.validation_seconds is not None:
        (seconds,) = session.strategy.ranks.all.all_reduce([session.interruption.elapsed()], "max")
        session.timetable.validated_seconds = seconds


def start_clock(session: Session) -> None:
    """Start the clocks of training, where a resumed run has stopped them."""
    session.interruption.start(session.state.seconds)
    session.timetable.validated_seconds = session.state.seconds


def num_steps(session: Session, data: TrainData) -> float:
    """Return the optimizer steps of a whole run; infinity without a limit."""
    settings, state = session.settings, session.state
    by_steps: float = math.inf if settings.last_step is None else settings.last_step
    by_steps = min(by_steps, _steps_by_samples(session, data))
    if data.num_batches == math.inf or settings.last_epoch is None or settings.accumulate_tokens is not None:
        return by_steps
    per_epoch = data.num_steps
    # optimizers of a resumed run are made with the schedule that they began with, though loaders may have changed since
    if not session.is_built and state.loaded_in.get("train") and state.steps_per_epoch is not None:
        per_epoch = state.steps_per_epoch
    return min(by_steps, per_epoch * settings.last_epoch)


def is_over(session: Session) -> bool:
    """Return whether training ends at this step boundary. Collective: every rank calls it."""
    state, progress, timetable = session.state, session.progress, session.timetable
    settings, interruption = session.settings, session.interruption
    last_step = timetable.next_check = math.inf if settings.last_step is None else settings.last_step
    if session.meetings.is_needed:
        progress.should_stop, has_failed, meeting = session.meetings.meet(
            state.global_step,
            should_stop=progress.should_stop,
            has_failed=session.writer.has_failed,
            is_between_epochs=state.is_between_epochs,
        )
        timetable.next_check = min(last_step, meeting)
        if session.strategy.ranks.stage.world_size > 1:
            session.metrics.reduce()  # brings the values logged by the last stage to rank 0's bar and callbacks
        if has_failed:  # all ranks raise together, so none waits for another in vain
            session.writer.close()
    if interruption.signal is not None or settings.is_reached(state):
        return True
    if not (progress.should_stop or (interruption.has_limit and interruption.is_time_up())):
        return False
    if state.global_step < settings.min_steps:  # all ranks have agreed to stop there
        timetable.next_check = min(timetable.next_check, settings.min_steps)
        return False
    return state.epoch + state.is_epoch_done >= settings.min_epochs


def counts_tokens(session: Session) -> bool:
    """Return whether a setting of the run, or of a callback, needs the number of tokens."""
    settings = session.settings
    intervals = (settings.validation_amount, settings.log_amount)
    is_interval = any(amount is not None and amount.unit == "tokens" for amount in intervals)
    asks = any(getattr(callback, "counts_tokens", False) for callback in session.callbacks)
    return settings.max_tokens is not None or settings.accumulate_tokens is not None or is_interval or asks


def amount_seen(session: Session, amount: Amount) -> int:
    """Return how many samples or tokens the run has seen."""
    return session.state.tokens_seen if amount.unit == "tokens" else session.state.samples_seen


def _plan_amount(session: Session) -> None:
    """Note after how many samples or tokens the next validation is due: at the next multiple of its interval."""
    amount = session.settings.validation_amount
    if amount is not None:
        session.timetable.next_amount = (amount_seen(session, amount) // amount.number + 1) * amount.number


def _steps_by_samples(session: Session, data: TrainData) -> float:
    """Return the steps after which ``max_samples`` were seen; infinity if that is not known."""
    most, size, sources = session.settings.max_samples, data.global_batch_size, data.sources()
    if session.settings.accumulate_tokens is not None:
        return math.inf
    if most is None or size is None or len(sources) != 1 or sources[0].in_batches or sources[0].end < 1:
        return math.inf
    epochs, rest = divmod(most, sources[0].end)
    return epochs * data.num_steps + math.ceil(rest / size)


def has_validation(session: Session) -> bool:
    """Return whether this fit validates at all."""
    return session.evaluation_data is not None and any(session.evaluation_data.num_batches)


def is_validation_due(session: Session, num_micro_batches: int) -> bool:
    """Return whether a validation follows the step just completed, which had this number of micro-batches."""
    seconds = session.settings.validation_seconds
    if seconds is not None:
        return session.interruption.agreed() - session.timetable.validated_seconds >= seconds
    amount = session.settings.validation_amount
    if amount is not None:
        return amount_seen(session, amount) >= session.timetable.next_amount
    state, data, interval = session.state, session.train_data, session.timetable.validation_interval
    assert data is not None
    now: float | Fraction = state.batches_in_epoch
    before: float | Fraction = now - num_micro_batches
    earlier: float = state.batches_before_epoch
    if data.scale != 1:  # the interval counts batches of the loader's own size
        now, before = data.as_planned(now), data.as_planned(before)
        is_known = math.isfinite(data.planned_batches)
        earlier = state.epoch * data.planned_batches if is_known else float(earlier / data.scale)
    if session.settings.check_val_every_n_epoch is not None:
        earlier = 0
    return (earlier + now) // interval > (earlier + before) // interval


def is_validation_due_at_epoch_end(session: Session) -> bool:
    """Return whether the epoch that was just completed ends with a validation."""
    interval = session.settings.val_check_interval
    at_end = interval == 1.0 and isinstance(interval, float)
    if not at_end or not has_validation(session) or session.timetable.validated_at == session.state.global_step:
        return False
    return validates_in_this_epoch(session)


def is_last_validation_due(session: Session) -> bool:
    """Return whether a validation is due because a hook set ``should_stop`` inside an epoch; the same on every rank."""
    if not session.progress.should_stop or session.interruption.signal is not None or not has_validation(session):
        return False
    return session.timetable.validated_at != session.state.global_step and validates_in_this_epoch(session)


def validates_in_this_epoch(session: Session) -> bool:
    """Return whether this is an epoch with validations."""
    every = session.settings.check_val_every_n_epoch
    return every is None or (session.state.epoch + 1) % every == 0


def reload_if_due(session: Session, kind: LoaderKind) -> None:
    """Request loaders again if ``reload_dataloaders_every_n_epochs`` epochs have passed since the last time."""
    every, loaded_in = session.settings.reload_dataloaders_every_n_epochs, session.state.loaded_in.get(kind)
    if every and session.reload is not None and (loaded_in is None or session.state.epoch - loaded_in >= every):
        session.reload(kind)


def steps_by_epoch(session: Session) -> bool:
    """Return whether schedulers are stepped when an epoch ends, other than those with a metric."""
    return any(config.interval == "epoch" and not config.reduce_on_plateau for config in session.schedulers)


def step_schedulers_of_epochs(session: Session) -> None:
    """Step the schedulers of the interval ``epoch`` without a metric, unless they have stepped in this epoch."""
    state = session.state
    if state.scheduled_epochs <= state.epoch:
        state.scheduled_epochs = state.epoch + 1
        step_schedulers(session, "epoch", state.epoch + 1)


def _last_count(session: Session, interval: str) -> float:
    """Return the count at which this fit ends; infinity if it is not known."""
    settings, data = session.settings, session.train_data
    if interval == "epoch":
        return math.inf if settings.last_epoch is None else settings.last_epoch
    return math.inf if data is None else num_steps(session, data)


def step_schedulers(session: Session, interval: str, count: int, *, with_metric: bool = False) -> None:
    """Step the schedulers of an interval (``step`` or ``epoch``) whose frequency divides the count.

    Schedulers with a metric are stepped separately, `with_metric`, once it is computed, and not before the first
    validation, which may log it. In manual optimization the module steps them all.

    Raises:
        ConfigError: if a metric that a scheduler monitors strictly was never logged.
    """
    for config in session.schedulers if session.module.automatic_optimization else ():
        if config.interval != interval or config.reduce_on_plateau != with_metric or count % config.frequency:
            continue
        if with_metric:
            session.metrics.reduce()  # a step's value, over all ranks
        name = config.monitor if with_metric else None  # other schedulers may name one, and are not stepped with it
        metric = session.metrics.callback_metrics().get(name) if name is not None else None
        may_come = has_validation(session) and session.timetable.validated_at < 0
        if with_metric and metric is None and config.strict and not may_come:
            known = sorted(session.metrics.callback_metrics())
            raise ConfigError(
                f"{type(config.scheduler).__name__} conditioned on metric {config.monitor}, which is not available. "
                f"Available metrics are: {known}. Log it, choose one of those, or set strict=False."
            )
        if metric is not None or not with_metric:
            is_watched = session.strategy.rank == 0
            if is_watched:
                config.warn_if_stepped()
                config.warn_if_stale(metric)
            session.module.lr_scheduler_step(config.scheduler, metric)
            if is_watched:
                config.note_step(goes_on=count < _last_count(session, interval))
