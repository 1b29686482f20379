"""Result: the outcome of a run in other processes, copied into the objects that the caller holds."""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor
from torch.optim import Optimizer

from ..callbacks.callback import Callback
from ..callbacks.dispatch import Hooks, callback_states, load_callback_states
from ..callbacks.run import Logger
from ..common.errors import ConfigError, ProcessError, RunError
from ..common.storage import AnyPath
from ..strategies.distributed.nested import iterate_tensors
from ..strategies.distributed.pickling import check_packs
from ..strategies.launch.node_folder import NodeFolder
from ..strategies.state.dtensor import local_shard
from . import checkpoint
from .checkpoint.manifest import Origin
from .checkpoint.single_file import SingleFile
from .data.train_data import TrainData
from .loggers.base import continue_loggers
from .metrics.metrics import Metrics
from .module.data_module import DataModule
from .module.optimizers import LRSchedulerConfig
from .module.train_module import TrainModule
from .resume.run_state import module_state, shown_to_hooks, training_state
from .session.interruption import Interruption
from .session.progress import Predictions, Progress, Saves
from .session.session import Session, Task
from .session.train_state import TrainState
from .tuning.attribute import set_attribute
from .unplaced import load_trained, trained_weights

if TYPE_CHECKING:
    from .data.evaluation_data import EvaluationData

_LEFT: Final = "left"
_LARGEST_LEFT: Final = 1 << 30
"""Bytes of optimizer state per rank up to which it is written though nobody may ask for it."""
_log = logging.getLogger(__name__)

_PACKAGE: Final = __name__.partition(".")[0]


@dataclass(frozen=True)
class Result:
    """The outcome of a run, picklable: what a user reads from trainer, module, callbacks and loggers afterwards."""

    model: dict[str, object] | None
    """The weights, under the plain module's names; None where they have not changed."""
    state: TrainState
    metrics: dict[str, Any]
    callbacks: dict[str, dict[str, Any]]
    versions: list[int | str | None]
    """For each logger, the version of this run: its folder."""
    signal: int | None
    should_stop: bool
    predictions: list[object] | None
    last_checkpoint: AnyPath | None
    resumed_from: AnyPath | None
    origin: Origin
    found: dict[str, float]
    """The attributes of module and data module that finders have set."""
    left: Path | None
    """The training state that `save_ended` needs, if no checkpoint of the run holds it."""
    lost: list[str]
    """Warnings of what could not be sent."""


def result_of(session: Session) -> Result:
    """Return the result of a run that ended without an error. Collective: every rank calls it."""
    is_fit = session.task == "fit"
    lost: list[str] = []
    left = None
    callbacks = _states_to_send(session.callbacks, lost)
    if is_fit:
        session.replicas.sync()
        left = _leave_training_state(session)
        _make_room(session)
    model = session.placed.full_model_state() if is_fit else None
    return Result(
        model=None if model is None else _weights_to_send(model, lost),
        state=session.state,
        metrics=session.metrics.state_dict() | {"logged": session.metrics.logged_metrics()},
        callbacks=callbacks,
        versions=[getattr(logger, "version", None) for logger in session.loggers],
        signal=session.interruption.signal,
        should_stop=session.progress.should_stop,
        predictions=None if session.predictions is None else session.predictions.outputs,
        last_checkpoint=session.saves.last,
        resumed_from=session.resumed_from,
        origin=session.origin,
        found=session.found,
        left=left,
        lost=lost,
    )


def _leave_training_state(session: Session) -> Path | None:
    """Write what `save_ended` needs into the folder of the run, unless its last checkpoint holds it. Collective."""
    strategy = session.strategy
    if session.saved_list is None or strategy.ranks.environment.num_nodes > 1:
        return None
    if strategy.ranks.all.on_first_rank(partial(_last_saved, session, ("loop",))) is not None:
        return None
    if strategy.ranks.all.all_reduce(float(_optimizer_bytes(session)), "max") > _LARGEST_LEFT:
        return None
    left = session.saved_list.parent / _LEFT
    try:
        state = training_state(session)
        session.writer.save(left, state, mesh=strategy.mesh_axes, origin=session.origin)
        session.writer.close()
    except Exception as error:  # noqa: BLE001 - of the user's code, or a full disk: the fit itself has succeeded
        _log.info("The training state was not kept for a save_checkpoint after the fit: %s", error)
        return None
    return left


def _optimizer_bytes(session: Session) -> int:
    """Return the bytes of this rank's optimizer state."""
    states = [dict(optimizer.state) for optimizer in session.optimizers]
    return sum(local_shard(tensor).nbytes for tensor in iterate_tensors(states))


def _last_saved(run: Session | EndedRun, parts: Collection[str] | None = None) -> dict[str, object] | None:
    """Return the last checkpoint of a run, or some parts of it, if it is of the last step."""
    last = run.saves.last
    saved = checkpoint.load(last, parts=parts) if last is not None and last.exists() else None
    return saved if saved is not None and saved["loop"]["global_step"] == run.state.global_step else None


def _states_to_send(callbacks: Sequence[Callback], lost: list[str]) -> dict[str, dict[str, object]]:
    """Return the state of each callback; note in `lost` whose state cannot be had or sent, which loses no other's."""
    states: dict[str, dict[str, object]] = {}
    for callback in callbacks:
        try:
            own = callback_states([callback])
            check_packs(own, f"{type(callback).__name__}.state_dict()")
        except Exception as error:  # noqa: BLE001 - of the user's code
            lost.append(_not_back(f"The state of {type(callback).__name__}", error))
        else:
            states |= own
    return states


def _weights_to_send(weights: dict[str, object], lost: list[str]) -> dict[str, object]:
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
    saves: Saves = field(default_factory=Saves)
    predictions: Predictions | None = None
    interruption: Interruption = field(default_factory=Interruption)
    optimizers: Sequence[Optimizer] = ()
    schedulers: Sequence[LRSchedulerConfig] = ()
    resumed_from: AnyPath | None = None
    train_data: TrainData | None = None
    evaluation_data: EvaluationData | None = None
    trained: Sequence[str] | None = None
    """The names of the weights that it has trained, if the module here has others."""
    folder: NodeFolder | None = None
    """The folder with the training state that its processes left; it lives as long as this."""

    def keep(self, left: Path) -> None:
        """Move the training state that the processes left into a folder that lives as long as this."""
        with suppress(OSError, ProcessError):  # then there is none to save
            self.folder = NodeFolder.create(left.parent.parent)
            weakref.finalize(self, _remove_if_owner, self.folder, os.getpid())
            left.rename(self.folder.path / _LEFT)


def _remove_if_owner(folder: NodeFolder, owner: int) -> None:
    """Remove the folder in the process that owns it, not in one forked from it."""
    if os.getpid() == owner:
        folder.remove()


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
    run.predictions = None if result.predictions is None else Predictions(result.predictions)
    run.saves.note(result.last_checkpoint)
    if result.left is not None:
        run.keep(result.left)
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


def save_ended(run: EndedRun, path: AnyPath, *, weights_only: bool, single_file: SingleFile | None) -> None:
    """Write a checkpoint of a run whose processes have ended.

    Their optimizers are gone: a checkpoint to resume from gets the training state of the checkpoint that the run saved
    last, if that is of its last step, else that which its processes left, and the weights of the caller's module.

    Raises:
        RunError: if there is neither, as after a fit on several nodes or with a gigabyte of optimizer state per rank.
    """
    save = partial(checkpoint.save, single_file=single_file)
    if weights_only or run.task != "fit":
        state = module_state(run.module, trained_weights(run.module, run.trained))
        save(path, shown_to_hooks(state, run.hooks, run.state))
        return
    weights = trained_weights(run.module, run.trained)  # the caller's current ones
    left, saved = run.folder.path / _LEFT if run.folder is not None else None, _last_saved(run)
    if saved is not None:
        state = {**saved, "model": weights}
    elif left is not None and left.is_dir():
        state = shown_to_hooks({**module_state(run.module, weights), **checkpoint.load(left)}, run.hooks, run.state)
    else:
        raise RunError(
            "The state of the optimizers is gone, as the processes of this fit have ended; its last checkpoint is "
            f"{run.saves.last} (the run ended at step {run.state.global_step}). Save it in on_train_end, "
            "fit with a ModelCheckpoint, or pass weights_only=True."
        )
    save(path, state, origin=run.origin.after())
