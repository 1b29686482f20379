"""Settings: the arguments of a Trainer, with their defaults and checks."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal, get_type_hints

from ...callbacks.callback import Callback
from ...callbacks.helpers.loggers import refuse_incomplete
from ...callbacks.run import Logger
from ...common.durations import Amount, parse_amount, parse_duration
from ...common.errors import ConfigError, did_you_mean
from ...common.other_trainers import WITHOUT_COUNTERPART, explain_argument
from ...common.storage import StorePath, any_path
from ...strategies import ActivationCheckpointing, Precision, Strategy, check_strategy
from ..loggers import DummyLogger, check_name
from .detailed_profilers import profiler_by_name
from .profiler import Profiler
from .setting_types import Defaulted, fits_annotation, name_type
from .train_state import TrainState

_LIMITS: Final = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches")
_AMOUNTS: Final = (*_LIMITS, "overfit_batches", "val_check_interval")
"""An int counts batches, and so does a float above 1.0; a float up to 1.0 is a fraction."""

_SWITCHED_OFF: Final = (
    *("logger", "log_every_n_steps", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"),
    *("enable_advice", "num_sanity_val_steps", "fast_dev_run", "detect_anomaly", "profiler"),
)
"""The settings that ``barebones`` switches off."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of `Trainer`, checked. Their meanings are in `TrainerArguments`, where editors find them.

    Raises:
        ConfigError: for an invalid value or combination of values.
    """

    # --- where ---
    strategy: str | Strategy = "auto"
    accelerator: str = "auto"
    devices: int | str | Sequence[int] = "auto"
    num_nodes: int = 1
    precision: Defaulted[str | int] = Defaulted("32-true")
    sync_batchnorm: bool = False

    # --- how long ---
    max_epochs: int | None = None
    min_epochs: Defaulted[int] = Defaulted(0)
    max_steps: int = -1
    min_steps: Defaulted[int] = Defaulted(0)
    max_time: str | timedelta | Mapping[str, int] | None = None
    max_samples: int | None = None
    max_tokens: int | None = None

    # --- the optimizer step ---
    accumulate_grad_batches: int = 1
    global_batch_size: int | None = None
    accumulate_tokens: int | None = None
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: Defaulted[Literal["norm", "value"]] = Defaulted("norm")
    activation_checkpointing: Literal["full", "selective"] | int | ActivationCheckpointing | None = None

    # --- how much of the data: an int counts batches, a float up to 1.0 is a fraction ---
    limit_train_batches: Defaulted[int | float] = Defaulted(1.0)
    limit_val_batches: Defaulted[int | float] = Defaulted(1.0)
    limit_test_batches: Defaulted[int | float] = Defaulted(1.0)
    limit_predict_batches: Defaulted[int | float] = Defaulted(1.0)
    overfit_batches: int | float = 0.0
    fast_dev_run: bool | int = False

    # --- evaluation and logging ---
    val_check_interval: Defaulted[int | float | str | timedelta | Mapping[str, int]] = Defaulted(1.0)
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: Defaulted[int] = Defaulted(2)
    log_every_n_steps: Defaulted[int | str] = Defaulted(50)
    logger: Defaulted[bool | str | Logger | Sequence[str | Logger]] = Defaulted(True)
    enable_autolog_hparams: bool = True

    # --- callbacks, profiler, folder ---
    callbacks: Callback | Sequence[Callback] | None = None
    enable_progress_bar: Defaulted[bool] = Defaulted(True)
    enable_checkpointing: Defaulted[bool] = Defaulted(True)
    enable_model_summary: Defaulted[bool] = Defaulted(True)
    enable_advice: Defaulted[bool] = Defaulted(True)
    profiler: str | Profiler | None = None
    default_root_dir: str | Path | None = None

    # --- numerics and the rest ---
    deterministic: Defaulted[bool | Literal["warn"]] = Defaulted(False)
    benchmark: bool | None = None
    detect_anomaly: bool = False
    check_replicas: Defaulted[Literal["error", "warn"]] = Defaulted("error")
    inference_mode: bool = True
    use_distributed_sampler: bool = True
    reload_dataloaders_every_n_epochs: int = 0
    compile: bool | Mapping[str, object] = False
    barebones: bool = False

    def __post_init__(self) -> None:
        check_strategy(self.strategy)
        for logger in self.logger if isinstance(self.logger, list | tuple) else [self.logger]:
            if isinstance(logger, str):
                check_name(logger)
            else:
                refuse_incomplete(logger)
        _check_types(self)
        _check_counts(self)
        _check_amounts(self)
        _check_combinations(self)
        Precision(self.precision)
        profiler_by_name(self.profiler)
        parse_duration("max_time", self.max_time)

    @property
    def last_epoch(self) -> int | None:
        """The number of epochs after which training ends; None for no limit."""
        if self.max_epochs is None:
            others = (self.last_step, self.max_time, self.max_samples, self.max_tokens)
            return 1000 if all(limit is None for limit in others) else None
        return None if self.max_epochs == -1 else self.max_epochs

    @property
    def last_step(self) -> int | None:
        """The number of optimizer steps after which training ends; None for no limit."""
        return None if self.max_steps == -1 else self.max_steps

    @property
    def validation_seconds(self) -> float | None:
        """The time between validations; None if ``val_check_interval`` counts batches, samples or tokens."""
        interval = self.val_check_interval
        if isinstance(interval, int | float) or self.validation_amount is not None:
            return None
        duration = parse_duration("val_check_interval", interval)
        return None if duration is None else duration.total_seconds()

    @property
    def validation_amount(self) -> Amount | None:
        """The samples or tokens between validations; None if ``val_check_interval`` counts something else."""
        return parse_amount("val_check_interval", self.val_check_interval)

    @property
    def log_amount(self) -> Amount | None:
        """The samples or tokens between rows for the loggers; None if ``log_every_n_steps`` counts steps."""
        return parse_amount("log_every_n_steps", self.log_every_n_steps)

    @property
    def log_steps(self) -> int:
        """The steps between rows for the loggers; 0 if there are none, or if samples or tokens are counted."""
        return self.log_every_n_steps if isinstance(self.log_every_n_steps, int) else 0

    @property
    def ends_by_amount(self) -> bool:
        """Whether a number of samples or tokens ends training."""
        return self.max_samples is not None or self.max_tokens is not None

    def is_used_up(self, state: TrainState) -> bool:
        """Return whether a run has seen the samples or tokens that end it; the same on every rank."""
        has_samples = self.max_samples is not None and state.samples_seen >= self.max_samples
        return has_samples or (self.max_tokens is not None and state.tokens_seen >= self.max_tokens)

    def is_reached(self, state: TrainState) -> bool:
        """Return whether a run has all its epochs, steps, samples or tokens; the same on every rank."""
        has_steps = self.last_step is not None and state.global_step >= self.last_step
        has_epochs = self.last_epoch is not None and state.epoch + state.is_epoch_done >= self.last_epoch
        return has_steps or has_epochs or self.is_used_up(state)

    def effective(self) -> Settings:
        """Return the settings with ``fast_dev_run``, ``overfit_batches`` and ``barebones`` applied to the others."""
        amounts = {name: getattr(self, name) for name in _AMOUNTS}
        changed: dict[str, Any] = {
            name: int(amount) for name, amount in amounts.items() if isinstance(amount, float) and amount > 1.0
        }
        if self.gradient_clip_val == 0:
            changed["gradient_clip_val"] = None
        if self.default_root_dir is not None:
            root = any_path("default_root_dir", self.default_root_dir)
            changed["default_root_dir"] = str(root) if isinstance(root, StorePath) else root
        if self.fast_dev_run:
            changed.update(self._development_run(int(self.fast_dev_run)))
        if self.overfit_batches:
            overfit = changed.get("overfit_batches", self.overfit_batches)
            changed.update(limit_train_batches=overfit, limit_val_batches=overfit)
        if self.barebones:
            changed.update(logger=False, enable_checkpointing=False, num_sanity_val_steps=0)
            changed.update(enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=0)
        if self.barebones or self.fast_dev_run or self.overfit_batches:
            changed.update(enable_advice=False)
        return replace(self, **changed) if changed else self

    def _development_run(self, num_batches: int) -> dict[str, object]:
        """Return the other settings that ``fast_dev_run`` changes."""
        return {
            **dict.fromkeys(_LIMITS, num_batches),
            "max_epochs": 1,
            "min_epochs": 0,
            "max_steps": num_batches,
            "max_samples": None,
            "max_tokens": None,
            "min_steps": 0,
            "val_check_interval": 1.0,
            "check_val_every_n_epoch": 1,
            "log_every_n_steps": 1,
            "num_sanity_val_steps": 0,
            "enable_checkpointing": False,
            "logger": DummyLogger() if self.logger else False,
        }


def make_settings(args: Sequence[object], given: dict[str, Any]) -> Settings:
    """Return the settings of a Trainer's arguments; point out one that is misspelled, or Lightning's alone.

    Raises:
        ConfigError: for these, and for an invalid value or combination of values.
    """
    if args:
        raise ConfigError(f"Trainer takes keyword arguments only, got {args!r}; write Trainer(max_epochs=3).")
    for name in WITHOUT_COUNTERPART:
        if name in given and not given[name]:  # None or an empty list requests nothing
            del given[name]
    known = [field.name for field in fields(Settings)]
    for name, value in given.items():
        if name not in known:
            raise ConfigError(
                explain_argument(name, value)
                or f"Trainer has no argument {name!r} (given as {value!r}).{did_you_mean(name, known)}"
            )
    if given.get("barebones"):
        _check_barebones(given)
    return Settings(**given)


@functools.cache  # to find them takes as long as a short fit
def _setting_types() -> dict[str, object]:
    return get_type_hints(Settings)


def _check_types(settings: Settings) -> None:
    if isinstance(settings.accumulate_grad_batches, Mapping):
        raise ConfigError(
            f"accumulate_grad_batches must be an int, got {settings.accumulate_grad_batches!r}; for a number that "
            "changes with the epoch, pass callbacks=GradientAccumulationScheduler(...) with this dict."
        )
    if isinstance(settings.accumulate_grad_batches, Callback):
        raise ConfigError(
            f"accumulate_grad_batches must be an int, got {type(settings.accumulate_grad_batches).__name__}(...), a "
            "callback; pass it in callbacks=, and leave accumulate_grad_batches out."
        )
    if isinstance(settings.callbacks, Mapping):
        raise ConfigError(
            f"callbacks must be a list of callbacks, got a dict with the keys {list(settings.callbacks)!r:.80}; pass "
            "callbacks=list(callbacks.values())."
        )
    for name, annotation in _setting_types().items():
        value = getattr(settings, name)
        if not fits_annotation(value, annotation):
            raise ConfigError(
                f"{name}={value!r} has the wrong type {type(value).__name__}; it must be {name_type(annotation)}."
            )


def _check_counts(settings: Settings) -> None:
    at_least: dict[str, int] = {
        "max_epochs": -1,
        "max_steps": -1,
        "max_samples": 1,
        "max_tokens": 1,
        "accumulate_tokens": 1,
        "min_epochs": 0,
        "min_steps": 0,
        "num_nodes": 1,
        "accumulate_grad_batches": 1,
        "global_batch_size": 1,
        "check_val_every_n_epoch": 1,
        "num_sanity_val_steps": -1,
        "log_every_n_steps": 0,
        "reload_dataloaders_every_n_epochs": 0,
    }
    for name, smallest in at_least.items():
        value = getattr(settings, name)
        if isinstance(value, int) and value < smallest:
            wanted = f"`{name}` must be a non-negative integer or -1 (no limit)"
            raise ConfigError(f"{wanted if smallest == -1 else f'{name} must be >= {smallest}'}, got {value}.")
    if settings.gradient_clip_val is not None and not settings.gradient_clip_val >= 0:
        raise ConfigError(
            f"gradient_clip_val must be above 0, got {settings.gradient_clip_val}; give such a number, or None for no "
            "clipping."
        )


def _check_amounts(settings: Settings) -> None:
    for name in _AMOUNTS:
        value = getattr(settings, name)
        if isinstance(value, int | float) and not (0 <= value <= 1 or (value > 1 and value % 1 == 0)):
            raise ConfigError(
                f"{name} was passed invalid value {value}, neither a fraction nor a number of batches; give a "
                "fraction from 0.0 to 1.0, or a number of batches as an int."
            )
    if isinstance(settings.log_every_n_steps, str) and settings.log_amount is None:
        raise ConfigError(
            f"log_every_n_steps={settings.log_every_n_steps!r} is no number of steps, samples or tokens; give an int, "
            "or '10_000 samples', '2.5M tokens' or the like."
        )
    interval = settings.val_check_interval
    if not isinstance(interval, int | float):
        if parse_amount("val_check_interval", interval) is None:
            _check_duration(interval)
    elif interval == 0:
        raise ConfigError(
            f"val_check_interval must be above 0, got {interval}; give a fraction of an epoch up to 1.0, batches as an "
            "int, or limit_val_batches=0 for no validation."
        )
    if settings.check_val_every_n_epoch is None and isinstance(interval, float) and interval < 1.0:
        raise ConfigError(
            "`val_check_interval` should be an integer or a time-based duration (str 'DD:HH:MM:SS', "
            "datetime.timedelta, or dict kwargs for timedelta) when `check_val_every_n_epoch=None`. That counts "
            f"batches across epochs, and val_check_interval={interval} is a fraction: give an int."
        )
    if not isinstance(settings.fast_dev_run, bool) and settings.fast_dev_run < 0:
        raise ConfigError(
            f"fast_dev_run should be >= 0, got {settings.fast_dev_run}; give True, False or a number of batches."
        )


def _check_duration(interval: str | timedelta | Mapping[str, int]) -> None:
    try:
        parse_duration("val_check_interval", interval)
    except ConfigError as error:
        if not isinstance(interval, str) or ":" in interval:
            raise
        raise ConfigError(
            f"val_check_interval={interval!r} is neither a duration 'DD:HH:MM:SS' nor a number of samples or tokens; "
            "give '10_000 samples', '2.5M tokens' or the like."
        ) from error


def _check_combinations(settings: Settings) -> None:
    if settings.global_batch_size is not None and settings.accumulate_grad_batches != 1:
        raise ConfigError(
            f"global_batch_size={settings.global_batch_size} derives the accumulation itself, but "
            f"accumulate_grad_batches={settings.accumulate_grad_batches} is set too; give one of them."
        )
    if settings.accumulate_tokens is not None and (
        settings.global_batch_size is not None or settings.accumulate_grad_batches != 1
    ):
        raise ConfigError(
            f"accumulate_tokens={settings.accumulate_tokens} chooses the micro-batches of each step, but "
            f"accumulate_grad_batches={settings.accumulate_grad_batches} and global_batch_size="
            f"{settings.global_batch_size} do, too; give one of them."
        )
    recomputed = ActivationCheckpointing.of(settings.activation_checkpointing)
    if settings.compile and recomputed is not None and recomputed.offload:
        raise ConfigError(
            f"compile={settings.compile!r:.40} cannot compile blocks that offload their activations, but "
            f"activation_checkpointing has offload={recomputed.offload}; drop one of them."
        )
    for name in ("epochs", "steps"):
        least, most = getattr(settings, f"min_{name}"), getattr(settings, f"max_{name}")
        if most is not None and 0 <= most < least:
            raise ConfigError(f"min_{name}={least} is above max_{name}={most}; raise max_{name} or drop min_{name}.")


def _check_barebones(given: Mapping[str, object]) -> None:
    for name in _SWITCHED_OFF:
        if given.get(name):
            raise ConfigError(
                f"`Trainer(barebones=True)` is configured, which switches {name} off, but "
                f"`Trainer({name}={given[name]!r})` was passed; drop one of them."
            )
