"""Settings: the arguments of a Trainer, with their defaults and checks."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Concatenate, Final, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from ...callbacks.callback import Callback
from ...callbacks.helpers.loggers import refuse_incomplete
from ...callbacks.run import Logger
from ...callbacks.timer import parse_duration
from ...strategies import ActivationCheckpointing, Precision, Strategy, check_strategy
from ...strategies.errors import ConfigError, did_you_mean
from .profiler import Profiler, profiler_by_name

P = ParamSpec("P")
S = TypeVar("S")

_LIMITS: Final = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of `Trainer`. Names and meanings are Lightning's; ``global_batch_size`` and ``compile`` are ours.

    Raises:
        ConfigError: for a value, or a combination of values, that cannot be.
    """

    # --- where ---
    strategy: str | Strategy = "auto"
    accelerator: str = "auto"
    """``auto``, ``cpu``, ``gpu``, ``cuda`` or ``mps``."""
    devices: int | str | Sequence[int] = "auto"
    """Devices of a node: a count, indices, -1 for all, or ``auto``: as many as the strategy can use."""
    num_nodes: int = 1
    precision: str | int = "32-true"
    """``32-true``, ``bf16-mixed``, ``16-mixed``, ``bf16-true`` or ``64-true``."""

    # --- how long ---
    max_epochs: int | None = None
    """-1 for no limit; 1000 where neither this nor ``max_steps`` nor ``max_time`` is given."""
    min_epochs: int = 0
    max_steps: int = -1
    """In optimizer steps; -1 for no limit."""
    min_steps: int = 0
    max_time: str | timedelta | Mapping[str, int] | None = None
    """Training time: a timedelta, its arguments, or ``"DD:HH:MM:SS"``."""

    # --- the optimizer step ---
    accumulate_grad_batches: int = 1
    global_batch_size: int | None = None
    """Samples of an optimizer step over all ranks; the loader's batch size is then the largest micro-batch."""
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: Literal["norm", "value"] = "norm"
    activation_checkpointing: Literal["full", "selective"] | int | ActivationCheckpointing | None = None
    """What forward does not keep for backward: all of each repeated block or of each n-th, or what is cheap."""

    # --- how much of the data: an int counts batches, a float is a fraction ---
    limit_train_batches: int | float = 1.0
    limit_val_batches: int | float = 1.0
    """0 switches validation off."""
    limit_test_batches: int | float = 1.0
    limit_predict_batches: int | float = 1.0
    overfit_batches: int | float = 0.0
    """Train and validate on the same first batches, unshuffled."""
    fast_dev_run: bool | int = False
    """Run this number of batches of everything (True: 1), without loggers, checkpoints and sanity check."""

    # --- evaluation and logging ---
    val_check_interval: int | float = 1.0
    """An int: micro-batches between validations; a float: the fraction of an epoch."""
    check_val_every_n_epoch: int | None = 1
    """None: ``val_check_interval`` counts across epochs."""
    num_sanity_val_steps: int = 2
    """Validation batches before training; -1 for all."""
    log_every_n_steps: int = 50
    logger: bool | Logger | Sequence[Logger] = True
    """True: a TensorBoardLogger, or a CSVLogger where tensorboard is not installed."""

    # --- what plugs in ---
    callbacks: Callback | Sequence[Callback] | None = None
    enable_progress_bar: bool = True
    enable_checkpointing: bool = True
    enable_model_summary: bool = True
    profiler: str | Profiler | None = None
    """``simple``, ``pytorch``, or a profiler."""
    default_root_dir: str | Path | None = None
    """None: the working directory."""

    # --- numerics and the rest ---
    deterministic: bool | Literal["warn"] = False
    benchmark: bool | None = None
    detect_anomaly: bool = False
    inference_mode: bool = True
    """Evaluate under ``torch.inference_mode`` rather than ``torch.no_grad``."""
    use_distributed_sampler: bool = True
    """Cut the samples of every batch among the ranks; False: the user's samplers already do."""
    reload_dataloaders_every_n_epochs: int = 0
    compile: bool | Mapping[str, Any] = False
    """True, or arguments of ``torch.compile``: compile the module in place."""
    barebones: bool = False
    """Switch off what costs time: loggers, checkpoints, progress bar, summary, sanity check, ``self.log``."""

    def __post_init__(self) -> None:
        check_strategy(self.strategy)
        for logger in self.logger if isinstance(self.logger, list | tuple) else [self.logger]:
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
        """After how many epochs training ends; None for no limit."""
        if self.max_epochs is None:
            return 1000 if self.max_steps == -1 and self.max_time is None else None
        return None if self.max_epochs == -1 else self.max_epochs

    @property
    def last_step(self) -> int | None:
        """After how many optimizer steps training ends; None for no limit."""
        return None if self.max_steps == -1 else self.max_steps

    def effective(self) -> Settings:
        """Return the settings with what ``fast_dev_run``, ``overfit_batches`` and ``barebones`` mean for the others."""
        changed: dict[str, Any] = {}
        if self.overfit_batches:
            changed.update(limit_train_batches=self.overfit_batches, limit_val_batches=self.overfit_batches)
        if self.fast_dev_run:
            changed.update(dict.fromkeys(_LIMITS, int(self.fast_dev_run)))
            changed.update(max_epochs=1, max_steps=int(self.fast_dev_run), val_check_interval=1.0, log_every_n_steps=1)
        if self.fast_dev_run or self.barebones:
            changed.update(logger=False, enable_checkpointing=False, num_sanity_val_steps=0)
        if self.barebones:
            changed.update(enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=0)
        return replace(self, **changed) if changed else self


def accepting(
    build: Callable[P, Settings],
) -> Callable[[Callable[[S, Settings], None]], Callable[Concatenate[S, P], None]]:
    """Give a constructor that takes one `Settings` the arguments of `Settings`, and point out a misspelt one."""

    def decorate(initialise: Callable[[S, Settings], None]) -> Callable[Concatenate[S, P], None]:
        known = [field.name for field in fields(Settings)]

        def __init__(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
            if args:
                raise ConfigError(f"Trainer takes keyword arguments only, got {args!r}; write Trainer(max_epochs=3).")
            for name, value in kwargs.items():
                if name not in known:
                    raise ConfigError(
                        f"Trainer has no argument {name!r} (given as {value!r}).{did_you_mean(name, known)}"
                    )
            initialise(self, build(*args, **kwargs))

        __init__.__doc__ = initialise.__doc__
        signature = inspect.signature(Settings)
        myself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        __init__.__signature__ = signature.replace(parameters=[myself, *signature.parameters.values()])  # type: ignore[attr-defined]
        return __init__

    return decorate


def _check_types(settings: Settings) -> None:
    for name, annotation in get_type_hints(Settings).items():
        value = getattr(settings, name)
        if not fits(value, annotation):
            raise ConfigError(
                f"{name}={value!r} has the wrong type {type(value).__name__}; it must be {describe(annotation)}."
            )


def fits(value: object, annotation: Any) -> bool:
    """Return whether a value is of an annotated type, as far as it can be seen from outside; a bool is not a number."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return any(fits(value, part) for part in get_args(annotation))
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(annotation))
    if annotation is Any:
        return True
    if annotation is int or annotation is float:
        return not isinstance(value, bool) and isinstance(value, int if annotation is int else int | float)
    if origin is Sequence and isinstance(value, str):
        return False
    return isinstance(value, type(None) if annotation is None else (origin or annotation))


def describe(annotation: Any) -> str:
    """Return an annotation as a reader of an error message would say it."""
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(describe(part) for part in get_args(annotation))
    if get_origin(annotation) is Literal:
        return " or ".join(repr(choice) for choice in get_args(annotation))
    return "None" if annotation is type(None) else getattr(annotation, "__name__", str(annotation))


def _check_counts(settings: Settings) -> None:
    at_least: dict[str, int] = {
        "max_epochs": -1,
        "max_steps": -1,
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
        if value is not None and value < smallest:
            meaning = " (-1 means no limit)" if smallest == -1 else ""
            raise ConfigError(f"{name}={value} is not possible; give {smallest} or more{meaning}.")
    if settings.gradient_clip_val is not None and not settings.gradient_clip_val > 0:
        raise ConfigError(
            f"gradient_clip_val={settings.gradient_clip_val} is not possible; give a number above 0, or None for "
            "no clipping."
        )


def _check_amounts(settings: Settings) -> None:
    for name in (*_LIMITS, "overfit_batches"):
        value = getattr(settings, name)
        if value < 0 or (isinstance(value, float) and value > 1.0) or math.isnan(value):
            raise ConfigError(
                f"{name}={value} is not possible; give a fraction from 0.0 to 1.0, or a number of batches as an int."
            )
    if settings.limit_train_batches == 0:
        raise ConfigError(
            f"limit_train_batches={settings.limit_train_batches} leaves nothing to train on; give at least 1 batch, "
            "or call trainer.validate() to evaluate only."
        )
    interval = settings.val_check_interval
    if interval <= 0 or (isinstance(interval, float) and interval > 1.0):
        raise ConfigError(
            f"val_check_interval={interval} is not possible; give a fraction of an epoch up to 1.0, or batches as "
            "an int."
        )
    if settings.check_val_every_n_epoch is None and isinstance(interval, float):
        raise ConfigError(
            f"check_val_every_n_epoch=None counts batches across epochs, but val_check_interval={interval} is a "
            "fraction; "
            "give val_check_interval as an int."
        )
    if not isinstance(settings.fast_dev_run, bool) and settings.fast_dev_run < 0:
        raise ConfigError(
            f"fast_dev_run={settings.fast_dev_run} is not possible; give True, False or a number of batches."
        )


def _check_combinations(settings: Settings) -> None:
    if settings.global_batch_size is not None and settings.accumulate_grad_batches != 1:
        raise ConfigError(
            f"global_batch_size={settings.global_batch_size} derives the accumulation itself, but "
            f"accumulate_grad_batches={settings.accumulate_grad_batches} is set too; give one of them."
        )
    recomputed = ActivationCheckpointing.of(settings.activation_checkpointing)
    if settings.compile and recomputed is not None and recomputed.offload:
        raise ConfigError(
            f"compile={settings.compile!r:.40} cannot compile parts that move what they keep, but "
            f"activation_checkpointing has offload={recomputed.offload}; drop one of them."
        )
    if not settings.barebones:
        return
    wanted: dict[str, object] = {
        "logger": settings.logger not in (True, False),
        "profiler": settings.profiler is not None,
        "fast_dev_run": bool(settings.fast_dev_run),
        "detect_anomaly": settings.detect_anomaly,
    }
    for name, is_wanted in wanted.items():
        if is_wanted:
            raise ConfigError(
                f"barebones=True switches {name} off, but {name}={getattr(settings, name)!r}; drop one of them."
            )
