"""Trainer: settings, and fit / validate / test / predict."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..callbacks.console import say
from ..callbacks.dispatch import Hooks
from ..callbacks.run import Run
from ..callbacks.table import render_table
from ..strategies import Hardware, Precision, strategy_by_name
from ..strategies.errors import ConfigError, RunError
from . import checkpoint
from .accumulator import to_numbers
from .assembly import (
    build_optimizers,
    compile_in_place,
    load_evaluation_data,
    load_train_data,
    make_callbacks,
    make_loggers,
    root_dir,
    with_module_callbacks,
)
from .checks import check_loggers, check_manual, check_module, check_writable
from .data import DataModule
from .interruption import Interruption
from .loop import Results, evaluate, sanity_check, train
from .metrics import Metrics
from .module import TrainModule
from .module_hooks import ModuleHooks
from .numerics import numerics
from .profiler import profiler_by_name
from .session import Session, Task
from .settings import Settings, accepting, parse_time
from .snapshot import load_generators, load_position, load_training, load_weights, take_state
from .state import TrainState
from .view import RunView


@dataclass(frozen=True)
class _Request:
    """What one call of the trainer was asked."""

    task: Task
    module: TrainModule
    datamodule: DataModule | None
    train_loaders: Any = None
    evaluation_loaders: Any = None
    ckpt_path: str | Path | None = None


class Trainer(RunView):
    """Trains, evaluates and predicts with a `TrainModule`. Its arguments are the fields of `Settings`, by keyword.

    Raises:
        ConfigError: for an argument that does not exist or cannot be, with the value and what to do.
    """

    @accepting(Settings)
    def __init__(self, settings: Settings) -> None:
        self.settings = settings = settings.effective()
        self.strategy = strategy_by_name(settings.strategy)
        self._precision = Precision(settings.precision)
        self._hardware = self._choose_hardware()
        self.strategy.check(self._hardware, self._precision)
        self.loggers = make_loggers(settings)
        check_loggers(self.loggers)
        self._callbacks = make_callbacks(settings)
        self.profiler = profiler_by_name(settings.profiler)
        self.state = TrainState()

    def _choose_hardware(self) -> Hardware:
        devices = self.settings.devices
        if devices == "auto" and not self.strategy.uses_many_devices:
            devices = 1
        return Hardware.of(self.settings.accelerator, devices, self.settings.num_nodes)

    # --- what users call ---------------------------------------------------------------------------------------------

    def fit(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
    ) -> None:
        """Train the module, validating as the settings say.

        Args:
            model: what to train; it has the trained weights afterwards.
            train_dataloaders: a DataLoader or any iterable of batches, or a list, dict or `CombinedLoader` of them; a
                `DataModule` is taken as one.
            val_dataloaders: likewise.
            datamodule: brings the loaders instead.
            ckpt_path: a checkpoint to resume from; ``"last"`` for the newest valid one of this run's folder.

        Raises:
            EchelonError: for what is wrong with settings, module, data or checkpoint.
            KeyboardInterrupt: after Ctrl-C, once the step is finished and a checkpoint saved; the trainer can go on.
            SystemExit: with code 143 after SIGTERM or SIGUSR1, likewise.
        """
        if isinstance(train_dataloaders, DataModule):
            train_dataloaders, datamodule = None, train_dataloaders
        request = _Request("fit", model, datamodule, train_dataloaders, val_dataloaders, ckpt_path)
        with self._guarded(request):
            self.strategy.launch(partial(self._fit, request))
        self.session.interruption.raise_if_requested()

    def validate(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
    ) -> Results:
        """Run the validation data once; return, for each loader, what was logged.

        Args:
            model: by default the one of the last run.
            dataloaders: by default the data module's or the module's ``val_dataloader``.
            ckpt_path: load these weights before: a path, ``"best"`` or ``"last"``.
            verbose: print the results.
            datamodule: brings the loaders instead.
        """
        return self._evaluate("validate", model, dataloaders, ckpt_path, verbose, datamodule)

    def test(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
    ) -> Results:
        """Run the test data once; as `validate` otherwise."""
        return self._evaluate("test", model, dataloaders, ckpt_path, verbose, datamodule)

    def predict(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool = True,
        ckpt_path: str | Path | None = None,
    ) -> list[Any] | None:
        """Return what ``predict_step`` returns for every batch, in order and on the CPU; for several loaders, lists.

        With ``return_predictions=False`` nothing is kept: a `BasePredictionWriter` takes each batch.
        """
        request = self._request("predict", model, dataloaders, datamodule, ckpt_path)
        with self._guarded(request):
            self.strategy.launch(partial(self._run_evaluation, request, keeps_predictions=return_predictions))
        return list(self.predictions) if self.predictions is not None else None

    def save_checkpoint(self, path: str | Path, weights_only: bool = False) -> None:
        """Write a checkpoint directory at `path`; it exists whole or not at all. Collective: every rank calls it.

        Raises:
            RunError: where there is no run whose state could be saved.
            CheckpointError: if it cannot be written, or its state holds what is no tensor and no JSON.
        """
        weights_only = weights_only or self.session.task != "fit"
        with self.profiler.record("checkpoint"):
            state = take_state(self.session, weights_only=weights_only)
            if self.is_global_zero:
                for logger in self.loggers:
                    logger.save()
                checkpoint.save(Path(path), state)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a checkpoint directory; anything that is none is left alone."""
        checkpoint.remove(Path(path))

    def point_to_checkpoint(self, link: str | Path, path: str | Path) -> None:
        """Make `link` stand for the checkpoint at `path`, atomically."""
        checkpoint.point(Path(link), Path(path))

    # --- one run -----------------------------------------------------------------------------------------------------

    def _request(
        self, task: Task, model: TrainModule | None, loaders: Any, datamodule: DataModule | None, ckpt_path: Any
    ) -> _Request:
        if isinstance(loaders, DataModule):
            loaders, datamodule = None, loaders
        if model is None:
            model = self.model
            if model is None:
                raise ConfigError(f"Trainer.{task} was called with model=None before any fit; pass the module to run.")
            datamodule = datamodule if datamodule is not None or loaders is not None else self.datamodule
        return _Request(task, model, datamodule, evaluation_loaders=loaders, ckpt_path=ckpt_path)

    def _evaluate(
        self, task: Task, model: TrainModule | None, loaders: Any, ckpt_path: Any, verbose: bool, datamodule: Any
    ) -> Results:
        request = self._request(task, model, loaders, datamodule, ckpt_path)
        with self._guarded(request):
            results = self.strategy.launch(partial(self._run_evaluation, request))
        if verbose and self.is_global_zero and any(results):
            say(render_table(results, title=f"{task.capitalize()} metric"))
        return results

    @contextmanager
    def _guarded(self, request: _Request) -> Iterator[None]:
        """Check a request in the caller's process, before anything starts; and allow one run at a time."""
        if self._is_running:
            raise RunError(
                f"Trainer.{request.task} was called while {self.session.task} runs; call it when that has returned, "
                "or use another Trainer."
            )
        check_module(request.module, request.datamodule, request.task)
        check_manual(request.module, self.settings)
        folder = root_dir(self.settings, request.task)
        if folder is not None:
            check_writable(folder)
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    def _fit(self, request: _Request) -> None:
        """Fit, in this process."""
        with self._connected(request) as session, numerics(self.settings):
            saved = self._read(request.ckpt_path)
            if saved is not None:
                load_position(session, saved)  # the order of the samples hangs on the seed
            load_train_data(session, request.train_loaders)
            load_evaluation_data(session, "validate", request.evaluation_loaders)
            session.reload = partial(_reload, session, request)
            self._set_up_module(session)
            build_optimizers(session)
            if saved is not None:
                load_weights(session, saved)
                load_training(session, saved)
            self._introduce(session, is_resumed=saved is not None)
            session.hooks.call("on_fit_start")
            with session.interruption.listening():
                if saved is None:
                    sanity_check(session)
                else:
                    load_generators(saved)
                session.stage = "train"
                train(session)
                session.stage = None
            session.hooks.call("on_fit_end")

    def _run_evaluation(self, request: _Request, *, keeps_predictions: bool = False) -> Results:
        """Validate, test or predict, in this process."""
        with self._connected(request) as session, numerics(self.settings):
            load_evaluation_data(session, request.task, request.evaluation_loaders)
            assert session.evaluation_data is not None
            self._set_up_module(session)
            saved = self._read(request.ckpt_path)
            if saved is not None:
                load_weights(session, saved)
            if keeps_predictions:
                session.predictions = [[] for _ in session.evaluation_data.loaders]
            stage: Any = request.task
            return evaluate(session, stage)

    @contextmanager
    def _connected(self, request: _Request) -> Iterator[Session]:
        """Open the session of a run in this process, and end it in good order whatever happens."""
        self.strategy.connect(self._hardware, self._precision)
        session = self._session = self._open_session(request)
        status = "failed"
        try:
            if request.task == "fit" and self.is_global_zero:
                for logger in self.loggers:
                    logger.open()
            self._set_up(session)
            self.profiler.start(self.log_dir, self.strategy.rank)
            yield session
            status = "interrupted" if session.interruption.is_requested else "success"
        except BaseException as error:
            session.hooks.call("on_exception", error)
            if session.datamodule is not None:
                session.datamodule.on_exception(error)
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else status
            raise
        finally:
            self._close(session, status)

    def _open_session(self, request: _Request) -> Session:
        module, settings = request.module, self.settings
        callbacks = with_module_callbacks(self._callbacks, module)
        if request.task == "fit":
            self.state = TrainState(seed=torch.initial_seed())
            if settings.logger is True and self._session is not None:
                self.loggers = make_loggers(settings)  # another run, another folder
        metrics = Metrics(self.strategy)
        metrics.position = self.state.global_step
        run: Run = self
        module.attach(run, None if settings.barebones else metrics)
        if request.datamodule is not None:
            request.datamodule.trainer = run
        return Session(
            task=request.task,
            run=run,
            settings=settings,
            strategy=self.strategy,
            module=module,
            datamodule=request.datamodule,
            callbacks=callbacks,
            loggers=self.loggers,
            profiler=self.profiler,
            hooks=Hooks(run, module, ModuleHooks, callbacks),
            metrics=metrics,
            state=self.state,
            interruption=Interruption(parse_time(settings.max_time)),
        )

    def _set_up(self, session: Session) -> None:
        """Call the hooks that get the data and build the module."""
        stage = session.task
        for owner in (session.datamodule, session.module):
            if owner is not None and self.strategy.local_rank == 0:
                owner.prepare_data()
        self.strategy.barrier()
        if session.datamodule is not None:
            session.datamodule.setup(stage)
        session.hooks.call("setup", stage)
        session.module.configure_model()

    def _set_up_module(self, session: Session) -> None:
        compile_in_place(session.module, self.settings.compile)
        self.strategy.setup_module(session.module)

    def _read(self, ckpt_path: str | Path | None) -> dict[str, Any] | None:
        """Return the content of a checkpoint; None without one, also for ``last`` where there is none yet."""
        if ckpt_path is None:
            return None
        if ckpt_path == "best":
            callback = self.checkpoint_callback
            if callback is None or not callback.best_model_path:
                raise ConfigError(
                    f"ckpt_path='best' needs a checkpoint saved before, found {callback!r}; "
                    "fit with a ModelCheckpoint first, or give a path."
                )
            ckpt_path = callback.best_model_path
        given = {callback.dirpath for callback in self.checkpoint_callbacks}
        runs = Path(self.log_dir).parent.glob("*/checkpoints") if self.loggers else ()
        path = checkpoint.resolve(ckpt_path, *sorted({*given, *map(str, runs)} - {""}))
        return checkpoint.load(path) if path is not None else None

    def _introduce(self, session: Session, *, is_resumed: bool) -> None:
        """Tell the loggers what is run."""
        if not self.is_global_zero:
            return
        hparams = {
            name: value
            for owner in (session.datamodule, session.module)
            if owner is not None and owner.hparams_logged
            for name, value in owner.hparams_initial.items()
        }
        for logger in self.loggers:
            if is_resumed:
                logger.resume_at(session.state.global_step)
            if hparams:
                logger.log_hyperparams(hparams)
            if session.module.example_input_array is not None:
                logger.log_graph(session.module, session.module.example_input_array)

    def _close(self, session: Session, status: str) -> None:
        session.stage = None
        session.hooks.call("teardown", session.task)
        if session.datamodule is not None:
            session.datamodule.teardown(session.task)
        summary = self.profiler.stop()
        if self.is_global_zero:
            if summary:
                say(summary)
            numbers = to_numbers(session.metrics.callback_metrics())
            for logger in self.loggers:
                logger.finalize(numbers, status)
        self.strategy.close()


def _reload(session: Session, request: _Request) -> None:
    """Ask the user's hooks for the loaders again."""
    load_train_data(session, request.train_loaders)
    load_evaluation_data(session, "validate", request.evaluation_loaders)
