"""What a run in other processes leaves behind, on its way back to the caller's objects."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..callbacks.dispatch import callback_states, load_callback_states
from .loggers.base import continue_loggers
from .module.train_module import TrainModule
from .session.session import Session
from .session.train_state import TrainState


@dataclass(frozen=True)
class Outcome:
    """The end of a run: what a user reads from trainer, module, callbacks and loggers afterwards."""

    model: dict[str, Any] | None
    """The weights, under the plain module's names; None where they have not changed."""
    state: TrainState
    metrics: dict[str, Any]
    callbacks: dict[str, dict[str, Any]]
    versions: list[int | str | None]
    """Of the loggers: which folder of theirs is this run's."""
    signal: int | None
    should_stop: bool
    predictions: list[Any] | None
    last_checkpoint: Path | None


def outcome_of(session: Session) -> Outcome:
    """Return what is to be brought back of a run that has ended well. Collective: every rank calls it."""
    is_fit = session.task == "fit"
    if is_fit:
        session.strategy.sync_replicas()
    return Outcome(
        model=session.strategy.full_model_state() if is_fit else None,
        state=session.state,
        metrics=session.metrics.state_dict() | {"logged": session.metrics.logged},
        callbacks=callback_states(session.callbacks),
        versions=[getattr(logger, "version", None) for logger in session.loggers],
        signal=session.interruption.signal,
        should_stop=session.should_stop,
        predictions=session.predictions,
        last_checkpoint=session.last_checkpoint,
    )


def take_over(session: Session, outcome: Outcome) -> None:
    """Put the end of a run into the objects that the caller holds."""
    if outcome.model is not None:
        _load_model(session.module, outcome.model)
    session.metrics.load_state_dict(outcome.metrics)
    session.metrics.logged = outcome.metrics["logged"]
    load_callback_states(session.callbacks, outcome.callbacks)
    continue_loggers(session.loggers, outcome.versions)
    session.interruption.signal = outcome.signal
    session.should_stop = outcome.should_stop
    session.predictions = outcome.predictions
    session.last_checkpoint = outcome.last_checkpoint


def _load_model(module: TrainModule, state: dict[str, Any]) -> None:
    """Load the weights; layers that ``configure_model`` has built in the workers are built here as well."""
    if module.state_dict().keys() != state.keys():
        module.configure_model()
    module.load_state_dict(state)
