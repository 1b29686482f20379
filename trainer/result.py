"""Result: the outcome of a run in other processes, copied into the objects that the caller holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from torch.optim import Optimizer

from ..callbacks.callback import Callback
from ..callbacks.dispatch import Hooks, callback_states, load_callback_states
from ..callbacks.run import Logger
from ..strategies.errors import RunError
from . import checkpoint
from .checkpoint.manifest import Origin
from .data.evaluation_data import EvaluationData
from .data.train_data import TrainData
from .loggers.base import continue_loggers
from .metrics.metrics import Metrics
from .module.data_module import DataModule
from .module.optimizers import LRSchedulerConfig
from .module.train_module import TrainModule
from .resume.run_state import module_state, shown_to_hooks
from .session.interruption import Interruption
from .session.progress import Progress
from .session.session import Session, Task
from .session.train_state import TrainState
from .tuning.attribute import set_attribute

_PACKAGE: Final = __name__.partition(".")[0]


@dataclass(frozen=True)
class Result:
    """The outcome of a run, picklable: what a user reads from trainer, module, callbacks and loggers afterwards."""

    model: dict[str, Any] | None
    """The weights, under the plain module's names; None where they have not changed."""
    state: TrainState
    metrics: dict[str, Any]
    callbacks: dict[str, dict[str, Any]]
    versions: list[int | str | None]
    """For each logger, the version of this run: its folder."""
    signal: int | None
    should_stop: bool
    predictions: list[Any] | None
    last_checkpoint: Path | None
    origin: Origin
    found: dict[str, float]
    """The attributes of module and data module that finders have set."""


def result_of(session: Session) -> Result:
    """Return the result of a run that ended without an error. Collective: every rank calls it."""
    is_fit, progress = session.task == "fit", session.progress
    callbacks = callback_states(session.callbacks)
    if is_fit:
        session.replicas.sync()
        _make_room(session)
    return Result(
        model=session.strategy.full_model_state() if is_fit else None,
        state=session.state,
        metrics=session.metrics.state_dict() | {"logged": session.metrics.logged_metrics()},
        callbacks=callbacks,
        versions=[getattr(logger, "version", None) for logger in session.loggers],
        signal=session.interruption.signal,
        should_stop=progress.should_stop,
        predictions=progress.predictions,
        last_checkpoint=progress.last_checkpoint,
        origin=session.origin,
        found=progress.found,
    )


def _make_room(session: Session) -> None:
    """Free what is no longer read before this process ends, so that the whole weights fit beside their shards."""
    for parameter in session.module.parameters():
        parameter.grad = None
    if not any(map(_has_teardown, (*session.callbacks, session.module, session.datamodule))):
        for optimizer in session.optimizers:
            optimizer.state.clear()


def _has_teardown(owner: object) -> bool:
    """Return whether the user overrides ``teardown``, which may still read or save the training state."""
    return getattr(getattr(owner, "teardown", None), "__module__", __name__).partition(".")[0] != _PACKAGE


@dataclass(kw_only=True, eq=False)
class EndedRun:
    """The readable state of a run that was carried out, and has ended, in other processes.

    It has the names of `Session`; what existed only in those processes (optimizers, loaders) is empty here.
    """

    task: Task
    module: TrainModule
    datamodule: DataModule | None
    callbacks: Sequence[Callback]
    metrics: Metrics
    state: TrainState
    origin: Origin
    hooks: Hooks
    progress: Progress = field(default_factory=Progress)
    interruption: Interruption = field(default_factory=Interruption)
    optimizers: Sequence[Optimizer] = ()
    schedulers: Sequence[LRSchedulerConfig] = ()
    resumed_from: Path | None = None
    train_data: TrainData | None = None
    evaluation_data: EvaluationData | None = None


def take_over(run: EndedRun, result: Result, loggers: Sequence[Logger]) -> None:
    """Copy the result of a run into the objects that the caller holds."""
    if result.model is not None:
        _load_model(run.module, result.model)
    run.metrics.load_state_dict(result.metrics)
    run.metrics.logged = result.metrics["logged"]
    load_callback_states(run.callbacks, result.callbacks)
    for name, value in result.found.items():
        set_attribute((run.module, run.datamodule), name, value)
    continue_loggers(loggers, result.versions)
    run.interruption.signal = result.signal
    run.progress.should_stop = result.should_stop
    run.progress.predictions = result.predictions
    run.progress.last_checkpoint = result.last_checkpoint


def _load_model(module: TrainModule, state: dict[str, Any]) -> None:
    """Load the weights; layers that ``configure_model`` has built in the workers are built here as well."""
    if module.state_dict().keys() != state.keys():
        module.configure_model()
    module.load_state_dict(state)


def save_ended(run: EndedRun, path: Path, *, weights_only: bool) -> None:
    """Write a checkpoint of a run whose processes have ended.

    Their optimizers are gone: a checkpoint to resume from gets the training state of the checkpoint that the run saved
    last, if that is of its last step, and the weights of the caller's module.

    Raises:
        RunError: if the run saved no checkpoint at its last step.
    """
    if weights_only or run.task != "fit":
        state = module_state(run.module, dict(run.module.state_dict()))
        checkpoint.save(path, shown_to_hooks(state, run.hooks, run.state))
        return
    last = run.progress.last_checkpoint
    saved = checkpoint.load(last) if last is not None and last.exists() else None
    if saved is None or saved["loop"]["global_step"] != run.state.global_step:
        raise RunError(
            "The state of the optimizers is gone, as the processes of this fit have ended; its last checkpoint is "
            f"{last} (the run ended at step {run.state.global_step}). Save it in on_train_end, fit with a "
            "ModelCheckpoint, or pass weights_only=True."
        )
    state = {**saved, "model": dict(run.module.state_dict())}  # the caller's current weights
    checkpoint.save(path, state, origin=run.origin.after())
