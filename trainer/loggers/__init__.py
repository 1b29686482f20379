"""Loggers, one file each, and what they share. Imports strategies and callbacks."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from .csv import CSVLogger as CSVLogger
from .dummy import DummyLogger as DummyLogger
from .mlflow import MLFlowLogger as MLFlowLogger
from .tensorboard import TensorBoardLogger as TensorBoardLogger
from .wandb import WandbLogger as WandbLogger


def default_logger(save_dir: str | Path) -> TensorBoardLogger | CSVLogger:
    """Return the logger of ``Trainer(logger=True)``: TensorBoard, or a CSV table if that is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        return CSVLogger(save_dir)
    return TensorBoardLogger(save_dir, default_hp_metric=False)  # no curve that the user did not log
