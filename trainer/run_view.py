"""RunView: where a run is and what it is made of, as hooks and users read it from the trainer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..callbacks.callback import Callback
from ..callbacks.early_stopping import EarlyStopping
from ..callbacks.model_checkpoint import ModelCheckpoint
from ..callbacks.progress import TQDMProgressBar
from ..callbacks.run import Logger, Stage
from ..strategies import Strategy
from ..strategies.errors import RunError
from .data.sample_trace import Trail
from .module.data_module import DataModule
from .module.optimizers import LRSchedulerConfig
from .module.train_module import TrainModule
from .resume.take_snapshot import take_snapshot
from .session.profiler import Profiler
from .session.session import Session
from .session.settings import Settings
from .session.train_state import TrainState


class RunView:
    """The readable side of `Trainer`; after a run it still shows how that ended. It satisfies `callbacks.run.Run`."""

    settings: Settings
    strategy: Strategy
    loggers: Sequence[Logger]
    profiler: Profiler
    state: TrainState
    _callbacks: list[Callback]
    _session: Session | None = None
    _is_running = False

    @property
    def session(self) -> Session:
        """The run that is going on, or the last one.

        Raises:
            RunError: before the first.
        """
        if self._session is None:
            raise RunError("No run has begun, found None in its place; call fit, validate, test or predict first.")
        return self._session

    # --- where the run is ---

    @property
    def stage(self) -> Stage | None:
        """What is running; None before and after."""
        return self._session.stage if self._session is not None and self._is_running else None

    @property
    def sanity_checking(self) -> bool:
        """Whether the few validation batches before training are running."""
        return self.stage == "sanity_check"

    @property
    def training(self) -> bool:
        """Whether training batches are running."""
        return self.stage == "train"

    @property
    def validating(self) -> bool:
        """Whether a validation is running, inside `fit` or alone."""
        return self.stage == "validate"

    @property
    def testing(self) -> bool:
        """Whether a test is running."""
        return self.stage == "test"

    @property
    def predicting(self) -> bool:
        """Whether a prediction is running."""
        return self.stage == "predict"

    @property
    def current_epoch(self) -> int:
        """The epoch that is running, from 0; during its end hooks and checkpoint too."""
        return self.state.epoch

    @property
    def global_step(self) -> int:
        """The number of optimizer steps completed, those before a resume included."""
        return self.state.global_step

    @property
    def samples_seen(self) -> int:
        """The number of training samples consumed by all ranks, those before a resume included."""
        return self.state.samples_seen

    @property
    def batch_position(self) -> int:
        """The index of the current micro-batch: the ``batch_idx`` of hooks and steps."""
        return self.session.batch_idx

    @property
    def max_epochs(self) -> int:
        """Training ends after so many epochs; -1 for no limit."""
        last = self.settings.last_epoch
        return -1 if last is None else last

    @property
    def max_steps(self) -> int:
        """Training ends after so many optimizer steps; -1 for no limit."""
        return self.settings.max_steps

    @property
    def is_last_batch(self) -> bool:
        """Whether the current micro-batch is the last of its epoch, as far as the data knows."""
        return self.session.batch_idx + 1 >= self.num_training_batches

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal or ``max_time`` ends training here: what is not saved now is lost."""
        interruption = self.session.interruption
        return interruption.is_requested or interruption.is_time_up()

    @property
    def num_training_batches(self) -> int | float:
        """Micro-batches of an epoch on this rank, limits applied; infinity if the data does not know."""
        data = self.session.train_data
        return data.num_batches if data is not None else 0

    @property
    def num_val_batches(self) -> Sequence[int | float]:
        """Batches of each validation loader, limits applied."""
        return self._num_batches("fit", "validate")

    @property
    def num_test_batches(self) -> Sequence[int | float]:
        """Batches of each test loader, limits applied."""
        return self._num_batches("test")

    @property
    def num_predict_batches(self) -> Sequence[int | float]:
        """Batches of each predict loader, limits applied."""
        return self._num_batches("predict")

    @property
    def num_sanity_val_batches(self) -> Sequence[int | float]:
        """Batches of each validation loader that run before training."""
        limit = self.settings.num_sanity_val_steps
        return [min(count, math.inf if limit == -1 else limit) for count in self._num_batches("fit")]

    @property
    def checkpoint_seconds(self) -> float:
        """For how many seconds of this run training has waited for `save_checkpoint` and `take_snapshot`."""
        return self.session.checkpoint_seconds

    @property
    def is_taking_snapshot(self) -> bool:
        """Whether ``on_save_checkpoint`` is called for `take_snapshot`."""
        return self.session.is_taking_snapshot

    def _num_batches(self, *tasks: str) -> Sequence[int | float]:
        data = self.session.evaluation_data if self.session.task in tasks else None
        return data.num_batches if data is not None else []

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the whole run: what a OneCycleLR wants as ``total_steps``."""
        data, settings = self.session.train_data, self.settings
        if data is None:
            raise RunError(
                f"estimated_stepping_batches is known during fit; found the task {self.session.task!r}. Call fit."
            )
        by_steps = math.inf if settings.last_step is None else settings.last_step
        if data.num_batches == math.inf or settings.last_epoch is None:
            return by_steps
        return min(by_steps, data.num_steps * settings.last_epoch)

    # --- what hooks may change ---

    @property
    def should_stop(self) -> bool:
        """Set it to end training at the next step boundary (not before ``min_epochs`` and ``min_steps``)."""
        return self.session.should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self.session.should_stop = value

    @property
    def accumulate_grad_batches(self) -> int:
        """Micro-batches of an optimizer step; set it in ``on_train_epoch_start``, for that epoch and those after it."""
        return self.settings.accumulate_grad_batches if self._session is None else self._session.accumulate_grad_batches

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, value: int) -> None:
        self.session.accumulate_grad_batches = value

    # --- metrics ---

    @property
    def callback_metrics(self) -> Mapping[str, Tensor]:
        """The newest value of everything logged."""
        return {} if self._session is None else self._session.metrics.callback_metrics()

    @property
    def logged_metrics(self) -> Mapping[str, Tensor]:
        """What the loggers received last."""
        return {} if self._session is None else self._session.metrics.logged

    @property
    def progress_bar_metrics(self) -> Mapping[str, float]:
        """The newest values logged with ``prog_bar=True``, as numbers: reading them waits for the device."""
        return {} if self._session is None else self._session.metrics.progress_bar()

    def reduce_metrics(self) -> None:
        """Reduce what the current step logged over all ranks. Collective: every rank calls it."""
        self.session.metrics.reduce()

    def metric_step(self, name: str) -> int | None:
        """Return the `global_step` at which the newest value of a callback metric was computed; None if never."""
        return self.session.metrics.computed_at(name)

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Send numbers to all loggers, at the current `global_step`."""
        self.session.log_numbers(metrics)

    @property
    def log_every_n_steps(self) -> int:
        """How often step metrics go to the loggers, in optimizer steps."""
        return self.settings.log_every_n_steps

    @property
    def logger(self) -> Logger | None:
        """The first logger, if there is one."""
        return next(iter(self.loggers), None)

    @property
    def log_dir(self) -> str:
        """The first logger's folder, else `default_root_dir`."""
        return self.loggers[0].log_dir if self.loggers else self.default_root_dir

    @property
    def default_root_dir(self) -> str:
        """Where everything goes that has no other place."""
        return str(self.settings.default_root_dir or ".")

    def follow_samples(self) -> Trail:
        """Return what tells from now on which samples each micro-batch holds; to be called in ``setup``."""
        self.session.trail = self.session.trail or Trail()
        return self.session.trail

    def take_snapshot(self) -> None:
        """Copy the state into memory that outlives this process, in an elastic run. Collective: every rank calls it."""
        take_snapshot(self.session)

    # --- parts ---

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0: the only one to write and to print."""
        return self.strategy.rank == 0

    @property
    def global_rank(self) -> int:
        """The rank of this process."""
        return self.strategy.rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.strategy.world_size

    @property
    def model(self) -> TrainModule | None:
        """The module of the current or last run."""
        return self._session.module if self._session is not None else None

    @property
    def datamodule(self) -> DataModule | None:
        """The data module of the current or last run, if it has one."""
        return self._session.datamodule if self._session is not None else None

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers that ``configure_optimizers`` returned."""
        return self._session.optimizers if self._session is not None else ()

    @property
    def lr_scheduler_configs(self) -> Sequence[LRSchedulerConfig]:
        """The schedulers that ``configure_optimizers`` returned."""
        return self._session.schedulers if self._session is not None else ()

    @property
    def callbacks(self) -> Sequence[Callback]:
        """All callbacks, the default ones included, in the order in which they are called."""
        return self._session.callbacks if self._session is not None else self._callbacks

    @property
    def checkpoint_callbacks(self) -> list[ModelCheckpoint]:
        """Every `ModelCheckpoint` among the callbacks."""
        return [callback for callback in self.callbacks if isinstance(callback, ModelCheckpoint)]

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The first `ModelCheckpoint`, if there is one: what ``ckpt_path="best"`` asks."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first `EarlyStopping`, if there is one."""
        return next((one for one in self.callbacks if isinstance(one, EarlyStopping)), None)

    @property
    def progress_bar_callback(self) -> TQDMProgressBar | None:
        """The progress bar, if there is one."""
        return next((one for one in self.callbacks if isinstance(one, TQDMProgressBar)), None)

    @property
    def predictions(self) -> Sequence[Any] | None:
        """What `predict` has collected: a list of batches, for several loaders a list of those."""
        collected = self._session.predictions if self._session is not None else None
        return collected[0] if collected is not None and len(collected) == 1 else collected
