"""Request: the arguments of one fit, validate, test or predict."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..strategies.errors import ConfigError
from .module.data_module import DataModule
from .module.train_module import TrainModule
from .resume.changed_settings import Winner
from .session.session import Task


@dataclass(frozen=True)
class Request:
    """One fit, validate, test or predict; it travels to the processes that carry it out."""

    task: Task
    module: TrainModule
    datamodule: DataModule | None
    train_loaders: Any = None
    evaluation_loaders: Any = None
    ckpt_path: str | Path | None = None
    optimizer_settings: Winner = "saved"
    checkpoint: Path | None = None
    """What `ckpt_path` stands for."""
    keeps_predictions: bool = False

    def parts(self) -> dict[str, object]:
        """Return what the user passed, by the names of the arguments."""
        return {
            "module": self.module,
            "datamodule": self.datamodule,
            "train_dataloaders": self.train_loaders,
            "dataloaders" if self.task != "fit" else "val_dataloaders": self.evaluation_loaders,
        }


class _LastRun(Protocol):
    @property
    def module(self) -> TrainModule: ...

    @property
    def datamodule(self) -> DataModule | None: ...


def evaluation_request(
    task: Task,
    module: TrainModule | None,
    loaders: Any,
    datamodule: DataModule | None,
    ckpt_path: str | Path | None,
    *,
    last: _LastRun | None,
) -> Request:
    """Return the request of an evaluation, by default with the module and the data module of the last run.

    Raises:
        ConfigError: if there is neither a module nor a last run.
    """
    if isinstance(loaders, DataModule):
        loaders, datamodule = None, loaders
    if module is None:
        if last is None:
            raise ConfigError(f"Trainer.{task} was called with model=None before any fit; pass the module to run.")
        module = last.module
        datamodule = datamodule if datamodule is not None or loaders is not None else last.datamodule
    return Request(task, module, datamodule, evaluation_loaders=loaders, ckpt_path=ckpt_path)
