"""LightningTrainer: `Trainer` with the arguments that only Lightning's Trainer has."""

from __future__ import annotations

import inspect
import logging
import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from ..callbacks import Callback, ModelCheckpoint, ProgressDisplay, Timer
from ..strategies import Strategy
from ..trainer.loggers import LoggersByName
from ..trainer.module.data_module import DataModule
from ..trainer.request import Request
from ..trainer.runner import Runner, Work
from ..trainer.session.train_state import TrainerState
from ..trainer.trainer import Trainer
from .extras.loggers import BY_NAME
from .extras.plugins import PrecisionPlugin, precision_plugin, settings_of
from .extras.saved_callbacks import SaverRead
from .extras.strategy_read import add_what_is_read
from .fit_loop import EvaluationLoop, FitLoop, PredictionLoop
from .parts import (
    Accelerator,
    AsyncCheckpointIO,
    CheckpointIO,
    ProgressBar,
    RunningStage,
    TorchCheckpointIO,
    TrainerFn,
    TrainerStatus,
    accelerator_for,
)
from .profiler import PROFILERS
from .tqdm_bar import KeptProgressBar

_log = logging.getLogger("echelon.lightning")


class AssignableState(TrainerState):
    """A trainer's state whose fields may be assigned.

    Args:
        assigned: where that is noted.
        fields: the values.
    """

    def __init__(self, assigned: dict[str, object], fields: Mapping[str, Any]) -> None:
        super().__init__(**fields)
        self.__dict__["_assigned"] = assigned

    def __eq__(self, other: object) -> bool:
        fields = ("status", "fn", "stage")
        return isinstance(other, TrainerState) and all(getattr(self, f) == getattr(other, f) for f in fields)

    __hash__ = TrainerState.__hash__

    def __setattr__(self, name: str, value: object) -> None:
        self.__dict__["_assigned"][name] = self.__dict__[name] = value


class LightningRunner(Runner):
    """A `Runner` whose hooks get the method as one of Lightning's enum, in ``setup(stage)`` and ``teardown(stage)``."""

    def execute(self, work: Work, request: Request) -> object:
        """Do the work in this process, or in processes of its own."""
        return super().execute(work, replace(request, task=TrainerFn(request.task)))  # type: ignore[arg-type]


def _stage_property(stage: RunningStage) -> property:
    def read(trainer: LightningTrainer) -> bool:
        return trainer.state.stage == stage

    def assign(trainer: LightningTrainer, value: bool) -> None:
        if value or read(trainer):
            state = trainer.state
            trainer.state = TrainerState(state.status, state.fn, stage if value else None)  # type: ignore[arg-type]

    return property(read, assign, doc=f"Whether the stage {stage.value!r} is running.")


class LightningTrainer(Trainer):
    """The `Trainer` for libraries built on Lightning; further arguments are those of `Trainer`.

    Its checkpoints are single files, since libraries open them with ``torch.load``.

    Args:
        plugins: launchers, precisions and synchronized layers are taken as the settings that they stand for, with a
            line in the log (level INFO). Checkpoint plugins are left out: Echelon reads and writes its checkpoints
            itself, beside the steps; there is a warning for one of your own.
        suggest_integrations: ignored; nothing is advertised.

    Raises:
        ConfigError: for other objects in `plugins`, and as in `Trainer`.
    """

    saves_single_files = True
    _runner_kind = LightningRunner
    keeps_classes = True  # libraries call them: hyper_parameters["encoder"].pop("cls")(...)
    _assigned_datamodule: DataModule | None = None

    def _loggers_by_name(self) -> LoggersByName:
        return BY_NAME

    def __init__(self, *, plugins: Any = None, suggest_integrations: bool = True, **settings: Any) -> None:
        plugins = _as_list(plugins)
        files = [plugin for plugin in plugins if isinstance(plugin, CheckpointIO)]
        _tell_of_files(files)
        settings.update(settings_of([plugin for plugin in plugins if plugin not in files], settings))
        if any(_is_foreign_bar(callback) for callback in _as_list(settings.get("callbacks"))):
            settings["enable_progress_bar"] = False  # the callback's bar is enough
        settings["callbacks"] = _with_defaults(settings)
        profiler = settings.get("profiler")
        if isinstance(profiler, str) and profiler.lower() in PROFILERS:
            settings["profiler"] = PROFILERS[profiler.lower()]()
        _tell_of_limits(settings)
        given = settings.get("accelerator")
        if isinstance(given, Accelerator):
            settings["accelerator"] = given.name()
        self._assigned_after: Any = None
        self._assigned_state: dict[str, object] = {}
        super().__init__(**settings)
        # not used to read or write: libraries only look at it
        self.strategy.checkpoint_io = files[0] if files else TorchCheckpointIO()  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, object]:
        """Leave out what was assigned after the last run, which stays in this process."""
        return {**self.__dict__, "_assigned_after": None, "_assigned_state": {}}

    @property
    def strategy(self) -> Strategy:
        """The strategy, with the module and the optimizers that programs read of it."""
        return add_what_is_read(super().strategy, self)

    @property
    def accelerator(self) -> Accelerator:
        """The accelerator of this trainer's devices; ``str`` returns its name."""
        return accelerator_for(self._runner.hardware.device_type)

    @property
    def _accelerator_connector(self) -> object:
        """The devices under the name that libraries read."""
        hardware = self._runner.hardware
        devices = hardware.list_devices()
        is_distributed = self.strategy.world_size > 1
        return SimpleNamespace(
            _parallel_devices=devices, _accelerator_flag=hardware.device_type, is_distributed=is_distributed
        )

    @property
    def precision_plugin(self) -> PrecisionPlugin:
        """The precision as a plugin, for reading."""
        return precision_plugin(self.precision, self._runner.hardware.device_type)

    @property
    def has_begun(self) -> bool:
        """Whether there is or was a run."""
        return self._runner.current is not None

    @property
    def max_epochs(self) -> int | None:  # type: ignore[override]
        """The number of epochs; -1 without a limit, and None before a run if none was given."""
        is_chosen = self.has_begun or self.settings.max_epochs is not None
        return super().max_epochs if is_chosen else None

    @property
    def fast_dev_run(self) -> bool | int:
        """The batches of a run that only tries the program; True is one."""
        number = self.settings.fast_dev_run
        return True if number == 1 else number

    @property
    def num_sanity_val_steps(self) -> int | float:
        """The batches of the validation before training; infinite for all."""
        steps = self.settings.num_sanity_val_steps
        return math.inf if steps == -1 else steps

    @property
    def datamodule(self) -> DataModule | None:
        """The data module of the current or last run; one that was assigned is for reading only."""
        own = super().datamodule
        return self._assigned_datamodule if own is None else own

    @datamodule.setter
    def datamodule(self, value: DataModule | None) -> None:
        self._assigned_datamodule = value

    @property
    def fit_loop(self) -> FitLoop:
        """The counters and limits of a fit, under Lightning's names."""
        return FitLoop(self, self._runner)

    @property
    def validate_loop(self) -> EvaluationLoop:
        """The counters of ``validate``, under Lightning's names."""
        return EvaluationLoop(self, self._runner, "validate")

    @property
    def test_loop(self) -> EvaluationLoop:
        """The counters of ``test``."""
        return EvaluationLoop(self, self._runner, "test")

    @property
    def predict_loop(self) -> PredictionLoop:
        """The counters of ``predict``, and what it returns."""
        return PredictionLoop(self, self._runner)

    @property
    def state(self) -> TrainerState:
        """The current or last method, what is running in it, and how it ended, as Lightning's enums.

        What is assigned, to it or to one of its fields, is read until the next run begins.
        """
        runner = self._runner
        if runner.is_running or runner.current is not self._assigned_after:
            self._assigned_after, self._assigned_state = runner.current, {}
        fields = vars(super().state).copy()
        if fields["status"] == "running" and fields["stage"] is None:  # in setup and teardown
            fields["stage"] = "train" if fields["fn"] == "fit" else fields["fn"]
        fields.update(self._assigned_state)
        kinds = {"status": TrainerStatus, "fn": TrainerFn, "stage": RunningStage}
        return AssignableState(self._assigned_state, {n: None if v is None else kinds[n](v) for n, v in fields.items()})

    @state.setter
    def state(self, value: TrainerState) -> None:
        fields: dict[str, object] = {"status": value.status, "fn": value.fn, "stage": value.stage}
        self._assigned_after, self._assigned_state = self._runner.current, fields

    training = _stage_property(RunningStage.TRAINING)
    validating = _stage_property(RunningStage.VALIDATING)
    testing = _stage_property(RunningStage.TESTING)
    predicting = _stage_property(RunningStage.PREDICTING)
    sanity_checking = _stage_property(RunningStage.SANITY_CHECKING)

    @property
    def progress_bar_callback(self) -> Any:
        """The progress bar, if there is one, including one that derives from Lightning's `ProgressBar`."""
        return next((callback for callback in self.callbacks if isinstance(callback, ProgressBar)), None)


def _with_defaults(settings: dict[str, Any]) -> object:
    """Return the callbacks, with those that the settings ask for where programs look for Lightning's."""
    given = settings.get("callbacks")
    mine = _as_list(given)
    if not all(isinstance(callback, Callback) for callback in mine):
        return given  # an error of the trainer's

    def asks_for(setting: str, kind: type[Callback]) -> bool:
        is_off = settings.get(setting) is False or settings.get("barebones")
        return not is_off and not any(isinstance(callback, kind) for callback in mine)

    bar = [KeptProgressBar()] if asks_for("enable_progress_bar", ProgressDisplay) else []
    has_timer = any(isinstance(callback, Timer) for callback in mine)
    is_timed = settings.get("max_time") is not None and not has_timer
    timer = [Timer(settings["max_time"], verbose=False)] if is_timed else []
    saver = [SaverRead()] if asks_for("enable_checkpointing", ModelCheckpoint) else []
    return [*bar, *mine, *timer, *saver]


def _is_foreign_bar(callback: object) -> bool:
    """Return whether a callback is a progress bar that the trainer does not recognize as one."""
    return isinstance(callback, ProgressBar) and not isinstance(callback, ProgressDisplay)


def _tell_of_files(plugins: Iterable[CheckpointIO]) -> None:
    for plugin in plugins:
        name = type(plugin).__name__
        if type(plugin) in (TorchCheckpointIO, AsyncCheckpointIO):
            _log.info("%s is taken: checkpoints are written beside the steps, without pickles.", name)
            continue
        warnings.warn(
            f"{name} is left out: Echelon reads and writes its checkpoints itself, without pickled objects.",
            stacklevel=3,
        )


def _tell_of_limits(settings: Mapping[str, object]) -> None:
    """Log what a limit of 1 means, one batch, and what 1.0 does, all of them: they are easily taken for each other."""
    stages = {"train": "epoch", "val": "validation", "test": "test", "predict": "prediction"}
    words = {**{f"limit_{stage}_batches": f"per {name}" for stage, name in stages.items()}, "overfit_batches": "in all"}
    for name, where in words.items():
        value = settings.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value == 1:
            used = f"1 batch {where}" if isinstance(value, int) else "100% of the batches"
            _log.info("`Trainer(%s=%s)` was configured so %s will be used.", name, value, used)
    if settings.get("barebones"):
        _log.info("You are running in `Trainer(barebones=True)` mode: what costs time beside the steps is off.")


def _as_list(value: object) -> list[object]:
    if value is None:
        return []
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]


def _make_signature() -> inspect.Signature:
    """Return the signature with named arguments, as libraries look for them."""
    own = inspect.signature(Trainer.__init__)
    only = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in ("plugins",)]
    return own.replace(parameters=[*own.parameters.values(), *only])


LightningTrainer.__init__.__signature__ = _make_signature()  # type: ignore[attr-defined]
