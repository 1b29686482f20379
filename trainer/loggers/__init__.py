"""Loggers, one file each, and what they share. Imports strategies and callbacks."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path

from .csv import CSVLogger
from .tensorboard import TensorBoardLogger

__all__ = ["CSVLogger", "TensorBoardLogger", "default_logger", "silence"]


def default_logger(save_dir: str | Path) -> TensorBoardLogger | CSVLogger:
    """Return what ``Trainer(logger=True)`` logs with: TensorBoard, or a table where that is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        return CSVLogger(save_dir)
    return TensorBoardLogger(save_dir, default_hp_metric=False)  # no curve that nobody logged


def silence(loggers: Iterable[object]) -> None:
    """Let the loggers of another rank than 0 write nothing, whoever uses them; a user's may have no ``silence``."""
    for logger in loggers:
        be_silent = getattr(logger, "silence", None)
        if be_silent is not None:
            be_silent()
