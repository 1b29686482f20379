"""Result: the outcome of a run in other processes, copied into the objects that the caller holds."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer

from ..callbacks.callback import Callback
from ..callbacks.dispatch import Hooks, callback_states, load_callback_states
from ..callbacks.run import Logger
from ..strategies.distributed.pickling import check_packs
from ..strategies.errors import ConfigError, RunError
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
from .unplaced import load_trained, trained_weights

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
    resumed_from: Path | None
    origin: Origin
    found: dict[str, float]
    """The attributes of module and data module that finders have set."""
    lost: list[str]
    """Warnings of what could not be sent."""


def result_of(session: Session) -> Result:
    """Return the result of a run that ended without an error. Collective: every rank calls it."""
    is_fit, progress = session.task == "fit", session.progress
    lost: list[str] = []
    callbacks = _states_to_send(session.callbacks, lost)
    if is_fit:
        session.replicas.sync()
        _make_room(session)
    model = session.strategy.full_model_state() if is_fit else None
    return Result(
        model=None if model is None else _weights_to_send(model, lost),
        state=session.state,
        metrics=session.metrics.state_dict() | {"logged": session.metrics.logged_metrics()},
        callbacks=callbacks,
        versions=[getattr(logger, "version", None) for logger in session.loggers],
        signal=session.interruption.signal,
        should_stop=progress.should_stop,
        predictions=progress.predictions,
        last_checkpoint=progress.last_checkpoint,
        resumed_from=session.resumed_from,
        origin=session.origin,
        found=progress.found,
        lost=lost,
    )


def _states_to_send(callbacks: Sequence[Callback], lost: list[str]) -> dict[str, dict[str, Any]]:
    """Return the state of each callback; note in `lost` whose state cannot be had or sent, which loses no other's."""
    states: dict[str, dict[str, Any]] = {}
    for callback in callbacks:
        try:
            own = callback_states([callback])
            check_packs(own, f"{type(callback).__name__}.state_dict()")
        except Exception as error:  # noqa: BLE001 - of the user's code
            lost.append(_not_back(f"The state of {type(callback).__name__}", error))
        else:
            states |= own
    return states


def _weights_to_send(weights: dict[str, Any], lost: list[str]) -> dict[str, Any]:
    """Return the entries that can be sent, among them all tensors; note the others in `lost`."""
    sent = {}
    for name, value in weights.items():
        try:
            if not isinstance(value, Tensor):
                check_packs(value, f"state_dict()[{name!r}]")
        except ConfigError as error:
            lost.append(_not_back(f"The entry {name!r} of the module's state", error))
        else:
            sent[name] = value
    return sent


def _not_back(what: str, error: Exception) -> str:
    return (
        f"{what} did not come back from the processes of the run, all else did; save it in a hook, "
        f"which runs there. ({type(error).__name__}: {error})"
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
    trained: Sequence[str] | None = None
    """The names of the weights that it has trained, if the module here has others."""


def take_over(run: EndedRun, result: Result, loggers: Sequence[Logger]) -> None:
    """Copy the result of a run into the objects that the caller holds; what cannot be copied loses nothing else.

    The weights come first, and a warning, which the user may have made an error, last.
    """
    lost = list(result.lost)
    if result.model is not None and (loss := load_trained(run.module, result.model)):
        run.trained = tuple(result.model)
        lost.append(loss)
    run.interruption.signal = result.signal
    run.progress.should_stop = result.should_stop
    run.progress.predictions = result.predictions
    run.progress.last_checkpoint = result.last_checkpoint
    run.metrics.load_state_dict(result.metrics)
    run.metrics.logged = result.metrics["logged"]
    for callback in run.callbacks:
        with _keeping_the_rest(f"The state of {type(callback).__name__}", lost):
            load_callback_states([callback], result.callbacks)
    for name, value in result.found.items():
        with _keeping_the_rest(f"The attribute {name!r} that a finder has set", lost):
            set_attribute((run.module, run.datamodule), name, value)
    for logger, version in zip(loggers, result.versions, strict=True):
        with _keeping_the_rest(f"The folder of {type(logger).__name__}", lost):
            continue_loggers([logger], [version])
    for loss in lost:
        warnings.warn(loss, stacklevel=2)


@contextmanager
def _keeping_the_rest(what: str, lost: list[str]) -> Iterator[None]:
    """Note in `lost` an error of the user's code in the block, instead of raising it."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - see above
        lost.append(_not_back(what, error))


def save_ended(run: EndedRun, path: Path, *, weights_only: bool) -> None:
    """Write a checkpoint of a run whose processes have ended.

    Their optimizers are gone: a checkpoint to resume from gets the training state of the checkpoint that the run saved
    last, if that is of its last step, and the weights of the caller's module.

    Raises:
        RunError: if the run saved no checkpoint at its last step.
    """
    if weights_only or run.task != "fit":
        state = module_state(run.module, trained_weights(run.module, run.trained))
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
    state = {**saved, "model": trained_weights(run.module, run.trained)}  # the caller's current weights
    checkpoint.save(path, state, origin=run.origin.after())
