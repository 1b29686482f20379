"""Loggers for Lightning: Echelon's in ``lightning_logs``, where programs look, and the base of a program's own."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

from torch import nn

from ...callbacks.run import Logger as AnyLogger
from ...trainer.loggers import CSVLogger as CSVLoggerOfEchelon
from ...trainer.loggers import LoggersByName
from ...trainer.loggers import MLFlowLogger as MLFlowLoggerOfEchelon
from ...trainer.loggers import TensorBoardLogger as TensorBoardLoggerOfEchelon
from ...trainer.loggers import WandbLogger as WandbLoggerOfEchelon
from ...trainer.loggers.base import FolderLogger
from ...trainer.loggers.dummy import DummyExperiment
from ...trainer.loggers.wandb import default_project
from .followed_folder import follow
from .utilities import known_as

NAME: Final = "lightning_logs"
_SEPARATOR: Final = "/"


@known_as("Logger")
class LoggerBase(AnyLogger, ABC):
    """Base of loggers: a subclass defines `name`, `version`, `log_metrics` and `log_hyperparams`.

    Any object with these methods is an instance of it.
    """

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        """Return whether a class has what a logger needs."""
        is_asked = cls is LoggerBase
        return True if is_asked and all(hasattr(other, name) for name in _NEEDED) else NotImplemented

    @property
    @abstractmethod
    def name(self) -> str | None:
        """The name, under which all versions are grouped."""

    @property
    @abstractmethod
    def version(self) -> int | str | None:
        """The run among those of the same name."""

    @property
    def save_dir(self) -> str | None:
        """The folder of the files of all runs; None for the trainer's ``default_root_dir``."""
        return None

    @property
    def root_dir(self) -> str | None:
        """The folder of all versions."""
        return None

    @property
    def log_dir(self) -> str | None:
        """The folder of this run."""
        return None

    @property
    def group_separator(self) -> str:
        """What stands between the name of a group of metrics and that of one of them."""
        return _SEPARATOR

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write numbers."""

    @abstractmethod
    def log_hyperparams(self, params: Mapping[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Write hyper-parameters."""

    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        """Write the graph of a module; override it."""

    def save(self) -> None:
        """Write everything to disk; override it."""

    def finalize(self, status: str) -> None:
        """End the run."""
        self.save()

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Learn of a checkpoint; override it."""


_NEEDED: Final = ("name", "version", "log_metrics", "log_hyperparams")


class _Named:
    """The constants of a logger that programs read."""

    LOGGER_JOIN_CHAR: ClassVar[str] = "-"

    @property
    def group_separator(self) -> str:
        """What stands between the name of a group of metrics and that of one of them."""
        return _SEPARATOR


class _WithHparamsFile(_Named, FolderLogger):
    """A logger that writes ``hparams.yaml`` even for a module that keeps no hyper-parameters, as programs read it."""

    NAME_HPARAMS_FILE: ClassVar[str] = "hparams.yaml"

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._folder = follow(self, self._folder)

    def _write_hparams(self) -> None:
        name = self.NAME_HPARAMS_FILE
        is_known = self._hparams or name in self._texts or (self._folder.path / name).exists()
        if not self._is_silent and not is_known:
            self._texts[name] = "{}\n"
            self.write_texts()


@known_as("CSVLogger")
class LightningCSVLogger(_WithHparamsFile, CSVLoggerOfEchelon):
    """A `CSVLogger` whose runs are in ``lightning_logs``."""

    def __init__(
        self,
        save_dir: str | Path,
        name: str | None = NAME,
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(save_dir, name, version, prefix, flush_logs_every_n_steps)

    @property
    def experiment(self) -> Any:
        """The logger itself; on ranks that write nothing, an object that accepts every call."""
        return DummyExperiment() if self._is_silent else super().experiment

    def save(self) -> None:
        """Write the rows that are still in memory, and the hyper-parameters."""
        super().save()
        self._write_hparams()


@known_as("TensorBoardLogger")
class LightningTensorBoardLogger(_WithHparamsFile, TensorBoardLoggerOfEchelon):
    """A `TensorBoardLogger` whose runs are in ``lightning_logs``; further arguments are those of ``SummaryWriter``."""

    def __init__(
        self,
        save_dir: str | Path,
        name: str | None = NAME,
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        *,
        sub_dir: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        folder = os.path.expandvars(save_dir)  # as Lightning does, for this logger alone
        super().__init__(folder, name, version, log_graph, default_hp_metric, prefix, sub_dir=sub_dir)
        self._writer_options.update(kwargs)

    def save(self) -> None:
        """Write everything logged so far to disk."""
        super().save()
        self._write_hparams()

    @property
    def hparams(self) -> dict[str, Any]:
        """The hyper-parameters that were logged."""
        return dict(self._hparams)


@known_as("WandbLogger")
class LightningWandbLogger(_Named, WandbLoggerOfEchelon):
    """A `WandbLogger` whose project is ``lightning_logs``, unless ``WANDB_PROJECT`` names another."""

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | Path = ".",
        version: str | None = None,
        offline: bool = False,
        dir: str | Path | None = None,
        id: str | None = None,
        *,
        project: str | None = None,
        anonymous: bool | None = None,
        experiment: Any = None,
        **kwargs: Any,
    ) -> None:
        if anonymous:
            kwargs["anonymous"] = "allow"
        if project is None and experiment is None:
            project = default_project(NAME)
        super().__init__(name, save_dir, version, offline, dir, id, project=project, experiment=experiment, **kwargs)


@known_as("MLFlowLogger")
class LightningMLFlowLogger(_Named, MLFlowLoggerOfEchelon):
    """An `MLFlowLogger` whose experiment is ``lightning_logs``."""

    def __init__(
        self,
        experiment_name: str = NAME,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, Any] | None = None,
        save_dir: str | Path = "./mlruns",
        log_model: Any = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(experiment_name, run_name, tracking_uri, tags, save_dir, log_model, **kwargs)


def _make_tensorboard(save_dir: str | Path) -> AnyLogger:
    return LightningTensorBoardLogger(save_dir, default_hp_metric=False)  # no curve that nobody logged


def _make_wandb(save_dir: str | Path) -> AnyLogger:
    return LightningWandbLogger(save_dir=save_dir)


def _make_mlflow(save_dir: str | Path) -> AnyLogger:
    return LightningMLFlowLogger(save_dir=Path(save_dir) / "mlruns")


BY_NAME: Final[LoggersByName] = {
    "tensorboard": _make_tensorboard,
    "csv": LightningCSVLogger,
    "wandb": _make_wandb,
    "mlflow": _make_mlflow,
}
"""The loggers of a trainer that is given none, or a name."""
