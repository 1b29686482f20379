"""The loggers of a trainer that is given none, or a name: in ``lightning_logs``, where programs look for files."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

from ...callbacks.run import Logger
from ...trainer.loggers import CSVLogger, LoggersByName, MLFlowLogger, TensorBoardLogger, WandbLogger

NAME: Final = "lightning_logs"


def _wandb(save_dir: str | Path) -> Logger:
    from wandb import env

    return WandbLogger(save_dir=save_dir, project=env.get_project(NAME))


def _mlflow(save_dir: str | Path) -> Logger:
    return MLFlowLogger(NAME, save_dir=Path(save_dir) / "mlruns")


BY_NAME: Final[LoggersByName] = {
    "tensorboard": partial(TensorBoardLogger, name=NAME, default_hp_metric=False),  # no curve that nobody logged
    "csv": partial(CSVLogger, name=NAME),
    "wandb": _wandb,
    "mlflow": _mlflow,
}
