"""Trainer: settings, and fit / validate / test / predict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from ..callbacks.dispatch import Hooks, check_state_keys
from ..callbacks.helpers.console import say
from ..callbacks.helpers.table import render_table
from ..callbacks.run import Run
from ..callbacks.timer import parse_duration
from ..strategies import Precision, place
from ..strategies.errors import CheckpointError, ConfigError, RunError
from .checkpoint import make_writer
from .checks import check_loggers, check_manual, check_module, check_writable
from .data.seed import capture_rng, restore_rng
from .default_callbacks import supervised
from .fit import fit, run_evaluation
from .loggers import silence
from .loggers.base import continue_loggers
from .loop.train import Results
from .metrics.accumulator import to_numbers
from .metrics.metrics import Metrics
from .module.data_module import DataModule
from .module.hooks import ModuleHooks
from .module.train_module import TrainModule
from .request import Request
from .result import Outcome, outcome_of, take_over
from .resume.after_restart import go_on, note_checkpoint, note_end, note_run
from .resume.changed_settings import Winner
from .resume.find_checkpoint import find_checkpoint
from .resume.rollback import roll_back
from .resume.run_state import still_parts, take_state
from .resume.take_snapshot import end_snapshots
from .run_view import RunView
from .session.interruption import Interruption
from .session.profiler import profiler_by_name
from .session.session import Session, Task
from .session.settings import Settings, accepting
from .session.torch_flags import numerics
from .session.train_state import TrainState
from .setup import make_callbacks, make_loggers, open_loggers, root_dir, set_up, with_module_callbacks

Work = Callable[[Session, Request], Any]


class Trainer(RunView):
    """Trains, evaluates and predicts with a `TrainModule`. Its arguments are the fields of `Settings`, by keyword.

    Raises:
        ConfigError: for an argument that does not exist or cannot be, with the value and what to do.
    """

    @accepting(Settings)
    def __init__(self, settings: Settings) -> None:
        self.settings = settings = settings.effective()
        self._precision = Precision(settings.precision)
        self.strategy, self._hardware = place(
            settings.strategy, settings.accelerator, settings.devices, settings.num_nodes
        )
        self.strategy.validate(self._hardware, self._precision)
        self.loggers = make_loggers(settings)
        check_loggers(self.loggers)
        self._callbacks = make_callbacks(settings)
        self.profiler = profiler_by_name(settings.profiler)
        self.state = TrainState()
        self._has_fitted = False
        self._is_introduced = False
        self._reports = False
        """Whether this is a copy in another process, whose caller waits for an `Outcome`."""
        self._outcome: Outcome | None = None

    # --- what users call ---------------------------------------------------------------------------------------------

    def fit(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        *,
        optimizer_settings: Winner = "saved",
    ) -> None:
        """Train the module, validating as the settings say.

        Args:
            model: what to train; it has the trained weights afterwards.
            train_dataloaders: a DataLoader or any iterable of batches, or a list, dict or `CombinedLoader` of them; a
                `DataModule` is taken as one.
            val_dataloaders: likewise.
            datamodule: brings the loaders instead.
            ckpt_path: a checkpoint to resume from; ``"last"`` for the newest valid one there is, if any.
            optimizer_settings: which learning rate, weight decay, length of schedule and so on count where the
                checkpoint was saved with others: the ``"saved"`` or the ``"configured"`` ones. What differs is logged.

        Raises:
            EchelonError: for what is wrong with settings, module, data or checkpoint.
            KeyboardInterrupt: after Ctrl-C, once the step is finished and a checkpoint saved; the trainer can go on.
            SystemExit: with code 143 after SIGTERM or SIGUSR1, likewise.
        """
        if isinstance(train_dataloaders, DataModule):
            train_dataloaders, datamodule = None, train_dataloaders
        request = Request("fit", model, datamodule, train_dataloaders, val_dataloaders, ckpt_path, optimizer_settings)
        self._run(fit, request)
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
        self._run(run_evaluation, replace(request, keeps_predictions=return_predictions))
        return list(self.predictions) if self.predictions is not None else None

    def save_checkpoint(self, path: str | Path, weights_only: bool = False, *, wait: bool = True) -> None:
        """Write a checkpoint directory at `path`; it exists whole or not at all. Collective: every rank calls it.

        With ``wait=False`` this returns when the state is copied; it is written while training goes on, and an error
        in that is raised at the next step boundary.

        Raises:
            RunError: where there is no run whose state could be saved.
            CheckpointError: if it cannot be written, or its state holds what is no tensor and no JSON.
        """
        session, began = self.session, monotonic()
        with self.profiler.record("checkpoint"):
            state = take_state(session, weights_only=weights_only or session.task != "fit")
            if self.is_global_zero:
                for logger in self.loggers:
                    logger.save()
            session.writer.save(Path(path), state, still=still_parts(session))
            if wait:
                session.writer.close()
        session.checkpoint_seconds += monotonic() - began
        if "loop" in state:
            session.last_checkpoint = Path(path)
            note_checkpoint(session, Path(path))

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a checkpoint directory; anything that is none is left alone."""
        if self.is_global_zero:
            self.session.writer.remove(Path(path))

    def point_to_checkpoint(self, link: str | Path, path: str | Path) -> None:
        """Make `link` stand for the checkpoint at `path`, atomically."""
        if self.is_global_zero:
            self.session.writer.point(Path(link), Path(path))

    def roll_back(self) -> Path | None:
        """Go back to the newest checkpoint of this run and skip the data read since; return it, None if there is none.

        To be called in ``on_train_step_end`` only. Collective: every rank calls it.
        """
        path = self.session.last_checkpoint
        if path is not None:
            roll_back(self.session, path)
        return path

    # --- one run -----------------------------------------------------------------------------------------------------

    def _request(
        self, task: Task, model: TrainModule | None, loaders: Any, datamodule: DataModule | None, ckpt_path: Any
    ) -> Request:
        if isinstance(loaders, DataModule):
            loaders, datamodule = None, loaders
        if model is None:
            model = self.model
            if model is None:
                raise ConfigError(f"Trainer.{task} was called with model=None before any fit; pass the module to run.")
            datamodule = datamodule if datamodule is not None or loaders is not None else self.datamodule
        return Request(task, model, datamodule, evaluation_loaders=loaders, ckpt_path=ckpt_path)

    def _run(self, work: Work, request: Request) -> Any:
        """Do the work in this process, or in processes of its own."""
        with self._guarded(request) as checked:
            if self.strategy.starts_processes:
                return self._launch(work, checked)
            with self._connected(checked) as session, numerics(self.settings):
                return work(session, checked)

    def _evaluate(
        self, task: Task, model: TrainModule | None, loaders: Any, ckpt_path: Any, verbose: bool, datamodule: Any
    ) -> Results:
        request = self._request(task, model, loaders, datamodule, ckpt_path)
        results: Results = self._run(run_evaluation, request)
        if verbose and self.is_global_zero and any(results):
            say(render_table(results, title=f"{task.capitalize()} metric"))
        return results

    @contextmanager
    def _guarded(self, request: Request) -> Iterator[Request]:
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
        # where the processes exist already, their rank 0 will be asked
        checkpoint = None if self._hardware.environment.is_external else self._find_checkpoint(request)
        self._is_running = True
        try:
            yield replace(request, checkpoint=checkpoint)
        finally:
            self._is_running = False

    def _find_checkpoint(self, request: Request) -> Path | None:
        sources = self.loggers, self.checkpoint_callbacks, self.default_root_dir
        return find_checkpoint(request.ckpt_path, *sources, to_resume=request.task == "fit")

    def _launch(self, work: Work, request: Request) -> Any:
        """Do the work in processes of its own, and take over what they leave behind."""

        def take(answer: tuple[Outcome, Any]) -> None:
            self._is_introduced = True
            self._precision.convert_module(request.module)
            self._session = self._open_session(request)
            self.state = self._session.state = answer[0].state
            take_over(self._session, answer[0])

        parts = {**request.parts(), "callbacks": self._callbacks, "loggers": self.loggers, "strategy": self.strategy}
        job = partial(self._report, work, request, capture_rng())
        return self.strategy.launch(job, on_result=take, parts=parts)[1]

    def _report(self, work: Work, request: Request, rng: Mapping[str, Any]) -> tuple[Outcome, Any]:
        """Do the work in a process of the run, begun as the caller's was, and return what it leaves behind."""
        restore_rng(rng)
        self._reports = True
        with self._connected(request) as session, numerics(self.settings):
            result = work(session, request)
        assert self._outcome is not None
        return self._outcome, result

    @contextmanager
    def _connected(self, request: Request) -> Iterator[Session]:
        """Open the session of a run in this process, and end it in good order whatever happens."""
        self.strategy.connect(self._hardware, self._precision)
        session = self._session = self._open_session(request)
        status = "failed"
        try:
            self._agree(session, request)
            set_up(session)
            self.profiler.start(self.log_dir, self.strategy.rank)
            yield session
            status = "interrupted" if session.interruption.is_requested else "success"
            note_end(session)
            if self._reports:
                self._outcome = outcome_of(session)
        except BaseException as error:
            self.strategy.annotate(error)
            session.hooks.call("on_exception", error)
            if session.datamodule is not None:
                session.datamodule.on_exception(error)
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else status
            # in a launched process the caller finds the culprit
            culprit = None if self._reports else self.strategy.blame_peer(error)
            if culprit is not None:
                raise culprit from error
            raise
        finally:
            self._close(session, status)

    def _agree(self, session: Session, request: Request) -> None:
        """Let all ranks go by rank 0's seed, checkpoint and folders."""
        strategy, environment = self.strategy, self._hardware.environment
        session.resumed_from = request.checkpoint
        if strategy.world_size > 1:
            if self.is_global_zero and not self._is_introduced:
                say(environment.describe())
            self._is_introduced = True
            if environment.is_external:
                session.resumed_from = strategy.collectives.on_first_rank(partial(self._find_checkpoint, request))
            session.state.seed = strategy.broadcast(session.state.seed)
        if not self.is_global_zero:
            silence(self.loggers)
        if request.task == "fit":
            go_on(session)
            continued = None if session.is_restarted else session.resumed_from
            versions = strategy.collectives.on_first_rank(partial(open_loggers, self.loggers, continued))
            note_run(session, versions)
            if not self.is_global_zero:
                continue_loggers(self.loggers, versions)

    def _open_session(self, request: Request) -> Session:
        module, settings = request.module, self.settings
        callbacks = with_module_callbacks(self._callbacks, module)
        callbacks = supervised(self.strategy, callbacks, logs=bool(self.loggers))
        check_state_keys(callbacks)
        if request.task == "fit":
            self.state = TrainState(seed=torch.initial_seed())
            if settings.logger is True and self._has_fitted:
                self.loggers = make_loggers(settings)  # another run, another folder
            self._has_fitted = True
        metrics = Metrics(self.strategy, module)
        metrics.position = self.state.global_step
        run: Run = self
        module.attach(run, None if settings.barebones else metrics)
        if request.datamodule is not None:
            request.datamodule.trainer = run
        return Session(
            task=request.task,
            run=run,
            settings=settings,
            writer=make_writer(self.strategy.group, is_async=request.task == "fit"),
            strategy=self.strategy,
            module=module,
            datamodule=request.datamodule,
            callbacks=callbacks,
            loggers=self.loggers,
            profiler=self.profiler,
            hooks=Hooks(run, module, ModuleHooks, callbacks),
            metrics=metrics,
            state=self.state,
            interruption=Interruption(
                parse_duration("max_time", settings.max_time), is_alone=self.strategy.world_size == 1
            ),
        )

    def _close(self, session: Session, status: str) -> None:
        session.stage = None
        if status == "failed":
            session.writer.abandon()
        end_snapshots(session, has_failed=status == "failed")
        with suppress(CheckpointError):  # after an error: it is that one which is raised, and the writer logs its own
            session.writer.close()
        if session.train_data is not None:
            session.train_data.close()
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

    def __getstate__(self) -> dict[str, Any]:
        """Leave the last run behind: a trainer that travels to another process begins one there."""
        return {**self.__dict__, "_session": None, "_outcome": None}
