"""Loggers, one file each, and what they share. Imports strategies and callbacks."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from ...callbacks.run import Logger
from ...strategies.errors import ConfigError, did_you_mean
from .csv import CSVLogger as CSVLogger
from .dummy import DummyLogger as DummyLogger
from .mlflow import MLFlowLogger as MLFlowLogger
from .tensorboard import TensorBoardLogger as TensorBoardLogger
from .wandb import WandbLogger as WandbLogger

_tensorboard = partial(TensorBoardLogger, default_hp_metric=False)  # no curve that the user did not log

BY_NAME: Final[Mapping[str, Callable[[str | Path], Logger]]] = {
    "tensorboard": _tensorboard,
    "csv": CSVLogger,
    "wandb": lambda save_dir: WandbLogger(save_dir=save_dir),
    "mlflow": lambda save_dir: MLFlowLogger(save_dir=Path(save_dir) / "mlruns"),
}
"""What ``Trainer(logger="tensorboard")`` makes, given the folder of the run's files."""


def default_logger(save_dir: str | Path) -> TensorBoardLogger | CSVLogger:
    """Return the logger of ``Trainer(logger=True)``: TensorBoard, or a CSV table if that is not installed."""
    return CSVLogger(save_dir) if importlib.util.find_spec("tensorboard") is None else _tensorboard(save_dir)


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
