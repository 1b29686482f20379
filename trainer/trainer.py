"""Trainer: settings, fit / validate / test / predict, and the state of the run that hooks read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Never

from torch import Tensor
from torch.optim import Optimizer

from ..callbacks.callback import Callback
from ..callbacks.run import Logger, Run, Stage
from ..common.console import say
from ..common.errors import RunError
from ..common.table import render_table
from ..strategies import Strategy
from .attributes import TrainerAttributes, refuse_others, takes_no_others
from .checkpoints import Checkpoints
from .fit import fit, run_evaluation
from .loggers import BY_NAME, LoggersByName
from .loop.evaluate import Results
from .loop.schedule import num_steps
from .module.data_module import DataModule
from .module.optimizers import LRSchedulerConfig
from .module.train_module import TrainModule
from .request import Request, evaluation_request, unwrap_compiled
from .result import EndedRun
from .resume.changed_settings import Winner
from .resume.take_snapshot import take_snapshot
from .session.arguments import TrainerArguments
from .session.profiler import Profiler
from .session.session import Session, Task
from .session.settings import Settings
from .session.trained_samples import TrainedSamples
from .trials import Trials


class Trainer(TrainerArguments, TrainerAttributes, Checkpoints, Trials):
    """Trains, evaluates and predicts with a `TrainModule`. Its arguments, by keyword, are those of `TrainerArguments`.

    Hooks see it as a `callbacks.run.Run`, which documents each property.

    Raises:
        ConfigError: for an unknown argument or an invalid value; the message says what to do.

    Example::

        trainer = Trainer(max_epochs=2, precision="bf16-mixed", gradient_clip_val=1.0)
        trainer.fit(module, train_loader, val_loader)
        trainer.callback_metrics["val_loss"]
    """

    def _begin(self, settings: Settings) -> None:
        run: Run = self
        self._runner = self._runner_kind(settings.effective(), run, self._loggers_by_name())

    def _loggers_by_name(self) -> LoggersByName:
        """Return what makes a logger that is given by its name."""
        return BY_NAME

    # --- what users call ---------------------------------------------------------------------------------------------

    @takes_no_others
    def fit(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
        *,
        optimizer_settings: Winner = "saved",
        **others: Never,
    ) -> None:
        """Train the module, with validation as configured.

        Args:
            model: the module to train, or ``torch.compile(module)``; it has the trained weights afterwards.
            train_dataloaders: a DataLoader or any iterable of batches, or a list, dict or `CombinedLoader` of them; a
                `DataModule` is accepted here, too.
            val_dataloaders: the same for validation, except a `DataModule`.
            datamodule: provides the loaders instead.
            ckpt_path: a checkpoint to resume from; ``"last"`` for the newest valid one, if there is one.
            weights_only: accepted for Lightning; it has no effect, since a checkpoint is never unpickled.
            optimizer_settings: which learning rate, weight decay, schedule length and so on to use where they differ
                from the checkpoint's: the ``"saved"`` or the ``"configured"`` ones. Differences are logged.

        Raises:
            EchelonError: for errors in settings, module, data or checkpoint.
            KeyboardInterrupt: after Ctrl-C, once the step is finished and a checkpoint saved; training can be resumed.
            SystemExit: with code 143 after SIGTERM or SIGUSR1, in the same way.

        Example::

            trainer = Trainer(max_epochs=2)
            trainer.fit(module, train_loader, val_loader)
            # later, or after an interruption: two epochs more
            Trainer(max_epochs=4).fit(module, train_loader, val_loader, ckpt_path="last")
        """
        refuse_others(Trainer.fit, others)
        if isinstance(train_dataloaders, DataModule):
            train_dataloaders, datamodule = None, train_dataloaders
        module = unwrap_compiled(model, self.strategy)
        request = Request("fit", module, datamodule, train_dataloaders, val_dataloaders, ckpt_path, optimizer_settings)
        self._runner.execute(fit, request)
        self._ran.interruption.raise_if_requested(self._ran.saves.last)

    @takes_no_others
    def validate(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
        **others: Never,
    ) -> Results:
        """Run the validation data once; return the logged metrics of each loader.

        Args:
            model: by default the module of the last run.
            dataloaders: by default the data module's or the module's ``val_dataloader``.
            ckpt_path: the checkpoint whose weights are loaded first: a path, ``"best"`` or ``"last"``.
            verbose: print the results.
            datamodule: provides the loaders instead.
            weights_only: as in `fit`.

        Example::

            metrics = trainer.validate(module, val_loader)
            metrics[0]["val_loss"]  # those of the first loader
        """
        refuse_others(Trainer.validate, others)
        return self._evaluate("validate", model, dataloaders, ckpt_path, verbose, datamodule)

    @takes_no_others
    def test(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
        **others: Never,
    ) -> Results:
        """Run the test data once; return the logged metrics of each loader.

        Args:
            model: by default the module of the last run.
            dataloaders: by default the data module's or the module's ``test_dataloader``.
            ckpt_path: the checkpoint whose weights are loaded first: a path, ``"best"`` or ``"last"``.
            verbose: print the results.
            datamodule: provides the loaders instead.
            weights_only: as in `fit`.

        Example::

            trainer.fit(module, train_loader, val_loader)
            trainer.test(dataloaders=test_loader, ckpt_path="best")
        """
        refuse_others(Trainer.test, others)
        return self._evaluate("test", model, dataloaders, ckpt_path, verbose, datamodule)

    @takes_no_others
    def predict(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool | None = True,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
        **others: Never,
    ) -> list[Any] | None:
        """Return what ``predict_step`` returns for every batch, in order and on the CPU; a list per loader for several.

        Args:
            model: by default the module of the last run.
            dataloaders: by default the data module's or the module's ``predict_dataloader``.
            datamodule: provides the loaders instead.
            return_predictions: False keeps nothing; a `BasePredictionWriter` can write each batch. None is True.
            ckpt_path: the checkpoint whose weights are loaded first: a path, ``"best"`` or ``"last"``.
            weights_only: as in `fit`.

        Example::

            batches = trainer.predict(module, test_loader)
            predictions = torch.cat(batches)
        """
        refuse_others(Trainer.predict, others)
        module = unwrap_compiled(model, self.strategy)
        request = evaluation_request("predict", module, dataloaders, datamodule, ckpt_path, last=self._runner.current)
        self._runner.execute(run_evaluation, replace(request, keeps_predictions=return_predictions is not False))
        return list(self.predictions) if self.predictions is not None else None

    def _evaluate(
        self, task: Task, model: TrainModule | None, loaders: object, ckpt_path: Any, verbose: bool, datamodule: Any
    ) -> Results:
        module = unwrap_compiled(model, self.strategy)
        request = evaluation_request(task, module, loaders, datamodule, ckpt_path, last=self._runner.current)
        results: Results = self._runner.execute(run_evaluation, request)
        if verbose and self.is_global_zero and any(results):
            say(render_table(results, title=f"{task.capitalize()} metric"))
        return results

    # --- where the run is ---

    @property
    def stage(self) -> Stage | None:
        return self._runner.stage

    @property
    def current_epoch(self) -> int:
        return self.counters.current_epoch

    @property
    def global_step(self) -> int:
        return self.counters.global_step

    @property
    def samples_seen(self) -> int:
        return self.counters.samples_seen

    @property
    def tokens_seen(self) -> int:
        """Tokens that all ranks have trained on since the very first `fit`, if a setting or callback counts them."""
        return self.counters.tokens_seen

    @property
    def batch_position(self) -> int:
        return self._ran.progress.batch_idx

    @property
    def max_epochs(self) -> int:
        return -1 if (last := self.settings.last_epoch) is None else last

    @property
    def max_steps(self) -> int:
        return self.settings.max_steps

    @property
    def is_interrupted(self) -> bool:
        is_ended = (interruption := self._ran.interruption).is_requested or interruption.is_time_up()
        return is_ended and not self.settings.is_reached(self._ran.state)

    @property
    def num_training_batches(self) -> int | float:
        return 0 if (data := self._ran.train_data) is None else data.num_batches

    @property
    def num_val_batches(self) -> Sequence[int | float]:
        return self._num_batches("fit", "validate")

    @property
    def num_test_batches(self) -> Sequence[int | float]:
        return self._num_batches("test")

    @property
    def num_predict_batches(self) -> Sequence[int | float]:
        return self._num_batches("predict")

    @property
    def num_sanity_val_batches(self) -> Sequence[int | float]:
        limit = self.settings.num_sanity_val_steps
        return [min(count, math.inf if limit == -1 else limit) for count in self._num_batches("fit")]

    @property
    def checkpoint_seconds(self) -> float:
        return self._ran.saves.seconds

    @property
    def is_taking_snapshot(self) -> bool:
        return self._ran.saves.is_taking_snapshot

    def _num_batches(self, *tasks: str) -> Sequence[int | float]:
        data = self._ran.evaluation_data
        return [] if data is None or self._ran.task not in tasks else data.num_batches

    @property
    def estimated_stepping_batches(self) -> int | float:
        data = self._ran.train_data
        if data is None:
            raise RunError(
                f"estimated_stepping_batches needs the data of a fit, got task={self._ran.task!r}; read it in fit."
            )
        return num_steps(self._runner.session, data)

    # --- what hooks may change ---

    @property
    def should_stop(self) -> bool:
        """Set to True to end training at the next step boundary (not before ``min_epochs`` and ``min_steps``)."""
        return self._runner.current is not None and self._ran.progress.should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if self._runner.current is not None:  # a fit begins with False, as in Lightning
            self._ran.progress.should_stop = value

    @property
    def accumulate_grad_batches(self) -> int:
        """Micro-batches per optimizer step; set it in ``on_train_epoch_start``, for that epoch and later ones."""
        current = self._runner.current
        return self.settings.accumulate_grad_batches if current is None else current.progress.accumulate_grad_batches

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, value: int) -> None:
        self._ran.progress.accumulate_grad_batches = value

    # --- metrics ---

    @property
    def callback_metrics(self) -> Mapping[str, Tensor]:
        return {} if (current := self._runner.current) is None else current.metrics.callback_metrics()

    @property
    def logged_metrics(self) -> Mapping[str, Tensor]:
        return {} if (current := self._runner.current) is None else current.metrics.logged_metrics()

    @property
    def progress_bar_metrics(self) -> Mapping[str, float]:
        return {} if (current := self._runner.current) is None else current.metrics.progress_bar()

    def reduce_metrics(self) -> None:
        self.session.metrics.reduce()

    def metric_step(self, name: str) -> int | None:
        return self.session.metrics.computed_at(name)

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        self.session.log_numbers(metrics)

    @property
    def log_every_n_steps(self) -> int:
        return self.settings.log_steps

    @property
    def is_log_step(self) -> bool:
        return self.session.is_log_step

    @property
    def loggers(self) -> Sequence[Logger]:
        return self._runner.loggers

    @loggers.setter
    def loggers(self, loggers: Sequence[Logger] | None) -> None:
        self._runner.set_loggers(list(loggers or ()))

    def follow_samples(self) -> TrainedSamples:
        return TrainedSamples(self.session)

    def take_snapshot(self) -> None:
        take_snapshot(self.session)

    # --- parts ---

    @property
    def session(self) -> Session:
        """The current or last run in this process: internal, without compatibility guarantees.

        Raises:
            RunError: before the first run, and after a run in other processes, which have ended.
        """
        return self._runner.session

    @property
    def _ran(self) -> Session | EndedRun:
        if self._runner.current is None:
            return self._runner.session  # raises
        return self._runner.current

    @property
    def strategy(self) -> Strategy:
        return self._runner.strategy

    @property
    def profiler(self) -> Profiler:
        """The profiler that measures the parts of a step."""
        return self._runner.profiler

    @property
    def is_global_zero(self) -> bool:
        return self.strategy.rank == 0

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        return current.optimizers if (current := self._runner.current) is not None else ()

    @property
    def lr_scheduler_configs(self) -> Sequence[LRSchedulerConfig]:
        return current.schedulers if (current := self._runner.current) is not None else ()

    @property
    def callbacks(self) -> Sequence[Callback]:
        return self._runner.callbacks

    @property
    def predictions(self) -> Sequence[Any] | None:
        current = self._runner.current
        collected = None if current is None or current.predictions is None else current.predictions.outputs
        return collected[0] if collected is not None and len(collected) == 1 else collected

    @property
    def batch_indices(self) -> Sequence[int]:
        return self._ran.progress.batch_indices

    @property
    def prediction_indices(self) -> Sequence[Sequence[Sequence[int]]]:
        predictions = self._ran.predictions
        return [] if predictions is None else predictions.indices


for _name, _member in vars(Trainer).items():  # properties without a docstring take it from `Run`
    if isinstance(_member, property) and _member.__doc__ is None and _name in vars(Run):
        _member.__doc__ = vars(Run)[_name].__doc__
