"""Trials: training steps of a run that are undone, with one callback in place of the run's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

from torch import nn

from ...callbacks.callback import Callback
from ...callbacks.dispatch import Hooks
from ...common.errors import ConfigError, DataError, RunError
from ..data.train_data import TrainData
from ..loop.train import train
from ..metrics.metrics import Metrics
from ..module.hooks import ModuleHooks
from ..session.interruption import Interruption
from ..session.profiler import PassThroughProfiler
from ..session.session import Session, take_placed
from ..steps.make_step import make_step
from .kept import restore_on_exit

Enter = Callable[[Session], AbstractContextManager[None]]
"""Makes a session the trainer's current one while a context lasts."""


def try_steps(
    session: Session,
    callback: Callback,
    num_steps: int,
    enter: Enter,
    *,
    micro_batch_size: int | None = None,
    num_micro_batches: int | None = None,
) -> None:
    """Train some steps of a run, then restore everything as it was, also after an error. Collective.

    The module's hooks are called as in training, and of callbacks only those of `callback`. Nothing is validated,
    logged or saved. State that data sets keep by themselves is not restored. With `micro_batch_size` the steps are cut
    into micro-batches of that size, at most `num_micro_batches` each.

    Raises:
        ConfigError: without a batch or an optimizer.
        DataError: for data that can be read only once, or that has no batch.
        RunError: anywhere except in a fit, between two optimizer steps.
    """
    _check_can_try(session)
    data = session.train_data
    assert data is not None
    with _put_back(session, data):
        trial = _trial_of(session, callback, num_steps)
        if micro_batch_size is not None:
            size = data.global_batch_size or 0
            most = size if num_micro_batches is None else num_micro_batches * micro_batch_size
            data.cut_into(micro_batch_size, global_batch_size=min(size, most))
            trial.progress.accumulate_grad_batches = data.accumulate
        with enter(trial), trial.progress.in_stage("train"):
            train(trial, make_step(trial))


def _check_can_try(session: Session) -> None:
    data = session.train_data
    if session.task != "fit" or data is None or not session.is_built or session.progress.is_in_step:
        raise RunError(
            f"Steps can be tried in a fit, between two optimizer steps, got {session.task} in stage="
            f"{session.progress.stage!r}; call this in on_fit_start, on_train_start or on_train_epoch_start."
        )
    if data.is_read_once:
        raise DataError(
            f"The training loader ({type(data.source).__name__}) can be read only once, but steps are tried on batches "
            "that the run reads again; pass a loader that begins again with each iter()."
        )
    if not data.num_batches or not session.optimizers:
        raise ConfigError(
            f"A step to try needs a batch and an optimizer, got {data.num_batches} training batches and "
            f"{len(session.optimizers)} optimizers; raise limit_train_batches, or return an optimizer from "
            "configure_optimizers."
        )


@contextmanager
def _put_back(session: Session, data: TrainData) -> Iterator[None]:
    module, strategy = session.module, session.strategy
    rng = session.streams.state_dict(strategy.devices)
    objects = [*module.modules(), *session.optimizers, session.placed.scaling.scaler]
    try:
        with (
            restore_on_exit(objects, list(module.parameters()), _called_in(module)),
            data.kept_place(session.state.epoch),
        ):
            yield
    finally:
        session.streams.load_state_dict(rng, strategy.devices)


def _called_in(module: nn.Module) -> list[object]:
    """Return the methods of a module that training calls."""
    names = [name for name in dir(type(module)) if name.startswith("on_") or name.endswith("_step")]
    return [getattr(module, name) for name in names]


def _trial_of(session: Session, callback: Callback, num_steps: int) -> Session:
    """Return a session with the parts of another one, but its own counters, hooks and metrics."""
    state = replace(session.state, optimizer_steps=list(session.state.optimizer_steps))
    settings = replace(session.settings, max_time=None, max_samples=None, max_tokens=None)
    endless = replace(settings, max_epochs=-1, min_epochs=0, min_steps=0)
    last_step = state.global_step + num_steps
    trial = Session(
        task="fit",
        run=session.run,
        # no schedulers are stepped, no values logged, and no loaders requested again
        settings=replace(endless, max_steps=last_step, log_every_n_steps=0, reload_dataloaders_every_n_epochs=0),
        strategy=session.strategy,
        streams=session.streams,
        module=session.module,
        datamodule=session.datamodule,
        callbacks=[callback],
        loggers=(),
        profiler=PassThroughProfiler(),
        hooks=Hooks(session.run, session.module, ModuleHooks, [callback]),
        metrics=Metrics(session.strategy, session.module),
        writer=session.writer,
        interruption=Interruption(is_alone=session.strategy.world_size == 1),
        state=state,
        origin=session.origin,
        train_data=session.train_data,
        optimizers=session.optimizers,
        is_built=True,
    )
    take_placed(trial, session.placed)
    trial.metrics.position = state.global_step
    trial.progress.accumulate_grad_batches = session.progress.accumulate_grad_batches
    session.module.attach(session.run, trial.module_metrics)
    return trial
