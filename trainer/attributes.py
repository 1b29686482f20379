"""Attributes of Lightning's Trainer that users read, beyond those that hooks need (`callbacks.run.Run`)."""

from __future__ import annotations

import difflib
import inspect
import warnings
from abc import ABCMeta
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

import torch

from ..callbacks.early_stopping import EarlyStopping
from ..callbacks.helpers.loggers import run_folder
from ..callbacks.model_checkpoint import ModelCheckpoint
from ..callbacks.progress_display import ProgressDisplay
from ..callbacks.run import Logger
from ..common.console import outlives_output_errors
from ..common.errors import ConfigError, RunError, did_you_mean
from ..common.other_trainers import ATTRIBUTES_OF_LIGHTNING
from ..common.storage import home_of
from .module.data_module import DataModule
from .module.train_module import TrainModule
from .runner import Runner
from .session.settings import Settings
from .session.train_state import Status, TrainerState, TrainState

Method = TypeVar("Method", bound=Callable[..., object])

_SETTINGS: Final = tuple(field.name for field in fields(Settings))
_SET_IN_RUNS: Final = ("accumulate_grad_batches", "logger")
"""Settings whose attribute can be set in a run, or sets something else."""
_FIXED: Final = (
    *("strategy", "accelerator", "devices", "num_nodes", "precision", "sync_batchnorm", "callbacks"),
    *("profiler", "default_root_dir", "fast_dev_run", "overfit_batches", "barebones"),
    *("enable_progress_bar", "enable_checkpointing", "enable_model_summary", "enable_advice", "enable_autolog_hparams"),
)
"""Settings by which a trainer is made: its strategy, callbacks and folder are what they said."""


def takes_no_others(method: Method) -> Method:
    """Leave ``**others`` out of the signature of a method that takes them only to refuse them with `refuse_others`."""
    signature = inspect.signature(method)
    known = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    method.__signature__ = signature.replace(parameters=known)  # type: ignore[attr-defined]
    return method


def refuse_others(method: Callable[..., object], others: Mapping[str, object]) -> None:
    """Refuse arguments that a method does not have.

    Raises:
        ConfigError: naming the argument that is meant.
    """
    for name, value in others.items():
        raise ConfigError(
            f"Trainer.{method.__name__} has no argument {name!r} (given as {value!r:.60})."
            f"{did_you_mean(name, list(inspect.signature(method).parameters)[1:])}"
        )


class _Names(ABCMeta):  # so that subclasses can be abstract
    """The class of the Trainer's class, which answers for class methods that Lightning's Trainer had."""

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            raise _missing_attribute_error(f"type object {cls.__name__!r}", name)


def _missing_attribute_error(owner: str, name: str) -> AttributeError:
    """Return the error for an attribute that a Trainer does not have."""
    remedy = ATTRIBUTES_OF_LIGHTNING.get(name)
    hint = f", which was Lightning's; {remedy}" if remedy is not None else ""
    return AttributeError(f"{owner} has no attribute {name!r}{hint}", name=name)


class TrainerAttributes(metaclass=_Names):
    """Lightning's names for the state, the parts and the processes of a run; read-only unless noted."""

    _runner: Runner
    _runner_kind: ClassVar[type[Runner]] = Runner
    """What carries out the requests."""

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute, or a setting of later runs; warn of a misspelt one, which no run would read.

        Raises:
            ConfigError: for a setting that is fixed once the trainer is made, or an invalid value.
            RunError: for a setting while a run reads it.
        """
        if name in _SETTINGS and name not in _SET_IN_RUNS:
            _change_setting(self._runner, name, value)
            return
        known = {*_SETTINGS, *_SET_IN_RUNS, "should_stop", "logger"}
        near = (
            [] if name.startswith("_") or hasattr(type(self), name) else difflib.get_close_matches(name, known, 1, 0.85)
        )
        if near:
            warnings.warn(f"trainer.{name} was set, which nothing reads. Did you mean {near[0]!r}?", stacklevel=2)
        super().__setattr__(name, value)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise an `AttributeError` that says what to use instead of one of Lightning's attributes."""
            raise _missing_attribute_error(f"{type(self).__name__!r} object", name)

    @property
    def settings(self) -> Settings:
        """The settings, with those applied that change others."""
        return self._runner.settings

    # --- what is running ---

    @property
    def training(self) -> bool:
        """Whether training batches are running."""
        return self._runner.stage == "train"

    @property
    def validating(self) -> bool:
        """Whether a validation is running, inside `fit` or alone."""
        return self._runner.stage == "validate"

    @property
    def testing(self) -> bool:
        """Whether a test is running."""
        return self._runner.stage == "test"

    @property
    def predicting(self) -> bool:
        """Whether a prediction is running."""
        return self._runner.stage == "predict"

    @property
    def sanity_checking(self) -> bool:
        """Whether the validation before training is running."""
        return self._runner.stage == "sanity_check"

    @property
    def evaluating(self) -> bool:
        """Whether a validation or a test is running."""
        return self.validating or self.testing

    @property
    def state(self) -> TrainerState:
        """The current or last method, what is running in it, and how it ended."""
        runner = self._runner
        if runner.current is None:
            return TrainerState()
        status: Status = "finished" if runner.has_finished and not self.interrupted else "interrupted"
        return TrainerState("running" if runner.is_running else status, runner.current.task, runner.stage)

    @property
    def counters(self) -> TrainState:
        """The counters of the current or last fit."""
        return self._runner.state

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint given to the current or last run; None without one."""
        current = self._runner.current
        return str(current.resumed_from) if current is not None and current.resumed_from is not None else None

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended the last run, or is about to end this one."""
        current = self._runner.current
        return current is not None and current.interruption.is_requested

    @property
    def received_sigterm(self) -> bool:
        """Whether this run has received SIGTERM."""
        current = self._runner.current
        return current is not None and current.interruption.signal == 15

    @property
    def is_last_batch(self) -> bool:
        """Whether the current micro-batch is the last of its epoch; False if the length is unknown."""
        current = self._runner.current
        if current is None or current.train_data is None:
            return False
        return current.progress.batch_idx + 1 >= current.train_data.num_batches

    # --- what takes part ---

    @property
    def model(self) -> TrainModule | None:
        """The module of the current or last run, also of one whose processes failed."""
        current = self._runner.current
        return self._runner.asked_for or (current.module if current is not None else None)

    @property
    def lightning_module(self) -> TrainModule | None:
        """The module of the current or last run, as `model`."""
        return self.model

    @property
    def datamodule(self) -> DataModule | None:
        """The data module of the current or last run, if it has one."""
        current = self._runner.current
        return current.datamodule if current is not None else None

    @property
    def train_dataloader(self) -> Any:
        """The training loaders of the current or last run, as they were passed or returned; None without any."""
        current = self._runner.current
        return current.train_data.source if current is not None and current.train_data is not None else None

    @property
    def val_dataloaders(self) -> Any:
        """The validation loaders of the current or last run; None without any."""
        return self._evaluation_loaders("fit", "validate")

    @property
    def test_dataloaders(self) -> Any:
        """The test loaders of the current or last run; None without any."""
        return self._evaluation_loaders("test")

    @property
    def predict_dataloaders(self) -> Any:
        """The prediction loaders of the current or last run; None without any."""
        return self._evaluation_loaders("predict")

    def _evaluation_loaders(self, *tasks: str) -> Any:
        current = self._runner.current
        data = current.evaluation_data if current is not None and current.task in tasks else None
        return data.source if data is not None else None

    @property
    def logger(self) -> Logger | None:
        """The first logger, if there is one; setting it between runs replaces all loggers."""
        return next(iter(self._runner.loggers), None)

    @logger.setter
    def logger(self, logger: Logger | None) -> None:
        self._runner.set_loggers([] if logger is None else [logger])

    @property
    def log_dir(self) -> str:
        """The first logger's folder, else `default_root_dir`; if that is a URL, a local folder that is copied there."""
        loggers, root = self._runner.loggers, self._runner.root
        return str(run_folder(loggers[0], root) if loggers else root)

    @property
    def default_root_dir(self) -> str:
        """The folder of loggers and checkpoints that have no other folder."""
        return str(home_of(self._runner.root))

    @property
    def checkpoint_callbacks(self) -> list[ModelCheckpoint]:
        """Every `ModelCheckpoint` among the callbacks."""
        return [callback for callback in self._runner.callbacks if isinstance(callback, ModelCheckpoint)]

    @property
    # as typeshed writes re.Match.group: who has passed such a callback need not rule out None
    def checkpoint_callback(self) -> ModelCheckpoint | Any:
        """The first `ModelCheckpoint`, if there is one; ``ckpt_path="best"`` refers to it."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        """Every `EarlyStopping` among the callbacks."""
        return [callback for callback in self._runner.callbacks if isinstance(callback, EarlyStopping)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first `EarlyStopping`, if there is one."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> ProgressDisplay | None:
        """The progress bar, if there is one."""
        return next((callback for callback in self._runner.callbacks if isinstance(callback, ProgressDisplay)), None)

    # --- processes and devices ---

    @property
    def global_rank(self) -> int:
        """The rank of this process."""
        return self._runner.strategy.rank

    @property
    def local_rank(self) -> int:
        """The rank of this process among those of its node."""
        return self._runner.strategy.local_rank

    @property
    def node_rank(self) -> int:
        """The rank of this node."""
        return self._runner.strategy.node_rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self._runner.strategy.world_size

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return self._runner.strategy.ranks.environment.num_nodes

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """The arguments for your own ``DistributedSampler``, with ``use_distributed_sampler=False``."""
        return {"num_replicas": self._runner.strategy.data_size, "rank": self._runner.strategy.data_rank}

    @property
    def num_devices(self) -> int:
        """The number of devices on each node."""
        return len(self.device_ids)

    @property
    def device_ids(self) -> list[int]:
        """The indices of the devices on this node."""
        return list(self._runner.hardware.devices)

    @property
    def precision(self) -> str:
        """The precision's name, such as ``bf16-mixed``."""
        return self._runner.precision.name

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of a ``16-mixed`` run; None in other precisions, and before the first run."""
        has_one = self._runner.precision.uses_scaler and self._runner.current is not None
        return self._runner.strategy.site.scaling.scaler if has_one else None

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[object]:
        """Return the context in which a module is built in the precision and on the device of the strategy.

        Args:
            empty_init: accepted for Lightning; parameters are always initialized.
        """
        return self._runner.strategy.init_context()

    def print(self, *args: Any, **options: Any) -> None:
        """Print on rank 0 only, as Python's ``print``."""
        if self.global_rank == 0:
            with outlives_output_errors() if options.get("file") is None else nullcontext():
                print(*args, **options)  # noqa: T201 - what it is for

    # --- settings ---

    @property
    def enable_validation(self) -> bool:
        """Whether `fit` validates, given a loader and a step: ``limit_val_batches`` is not 0."""
        return self.settings.limit_val_batches != 0


def _change_setting(runner: Runner, name: str, value: Any) -> None:
    """Change a setting for the runs that follow."""
    if name in _FIXED:
        raise ConfigError(f"trainer.{name} is fixed once the trainer is made, got {value!r:.80}; make another Trainer.")
    if runner.is_running:
        raise RunError(f"trainer.{name} was set while {runner.stage} runs, got {value!r:.80}; set it before the run.")
    runner.settings, runner.given = (
        replace(one, **{name: value}).effective() for one in (runner.settings, runner.given)
    )


# every other setting is also an attribute of the trainer, as in Lightning; Trainer overrides those that change in a run
for _field in fields(Settings):
    if not hasattr(TrainerAttributes, _field.name):
        setattr(TrainerAttributes, _field.name, property(attrgetter(f"settings.{_field.name}")))
