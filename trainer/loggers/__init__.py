"""Loggers, one file each, and what they share. Imports strategies and callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...callbacks.run import Logger
from ...common.errors import ConfigError, did_you_mean
from ...common.lazy_names import lazy_names
from .base import is_installed

if TYPE_CHECKING:
    from .csv import CSVLogger as CSVLogger
    from .dummy import DummyLogger as DummyLogger
    from .mlflow import MLFlowLogger as MLFlowLogger
    from .tensorboard import TensorBoardLogger as TensorBoardLogger
    from .wandb import WandbLogger as WandbLogger
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "csv": ("CSVLogger",),
            "dummy": ("DummyLogger",),
            "mlflow": ("MLFlowLogger",),
            "tensorboard": ("TensorBoardLogger",),
            "wandb": ("WandbLogger",),
        },
        ("BY_NAME", "LoggersByName", "check_name", "default_logger"),
    )


def _make_tensorboard(save_dir: str | Path) -> Logger:
    from .tensorboard import TensorBoardLogger

    return TensorBoardLogger(save_dir, default_hp_metric=False)  # no curve that the user did not log


def _make_csv(save_dir: str | Path) -> Logger:
    from .csv import CSVLogger

    return CSVLogger(save_dir)


def _make_wandb(save_dir: str | Path) -> Logger:
    from .wandb import WandbLogger

    return WandbLogger(save_dir=save_dir)


def _make_mlflow(save_dir: str | Path) -> Logger:
    from .mlflow import MLFlowLogger

    return MLFlowLogger(save_dir=Path(save_dir) / "mlruns")


LoggersByName = Mapping[str, Callable[[str | Path], Logger]]
BY_NAME: Final[LoggersByName] = {
    "tensorboard": _make_tensorboard,
    "csv": _make_csv,
    "wandb": _make_wandb,
    "mlflow": _make_mlflow,
}
"""What ``Trainer(logger="tensorboard")`` makes, given the folder of the run's files."""


def default_logger(save_dir: str | Path, by_name: LoggersByName = BY_NAME) -> Logger:
    """Return the logger of ``Trainer(logger=True)``: TensorBoard, or a CSV table if that is not installed."""
    return by_name["tensorboard" if is_installed("tensorboard") else "csv"](save_dir)


def check_name(name: str) -> None:
    """Check that a logger has this name.

    Raises:
        ConfigError: if none has; the message names the nearest.
    """
    if name not in BY_NAME:
        raise ConfigError(
            f"logger={name!r} is no logger's name.{did_you_mean(name, BY_NAME)} Or pass a logger, such as "
            "TensorBoardLogger('logs')."
        )
