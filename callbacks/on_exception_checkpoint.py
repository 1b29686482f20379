"""OnExceptionCheckpoint: save a checkpoint when training raises."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from torch import nn

from ..common.errors import CheckpointError, ConfigError
from ..common.storage import any_path, as_path
from ..strategies import Strategy
from .callback import Callback
from .run import Run


class OnExceptionCheckpoint(Callback):
    """Save ``<dirpath>/<filename>.ckpt`` when training raises, in a run with one process.

    A run that resumes from it skips the data of the failed step. The next error replaces the checkpoint.
    `ModelCheckpoint` with ``save_on_exception=True`` keeps such checkpoints beside its others.

    Args:
        dirpath: the folder.
        filename: the name of the checkpoint, without its extension.

    Raises:
        ConfigError: for an empty `filename`, and in a run with several processes.

    Example::

        Trainer(max_epochs=1, callbacks=OnExceptionCheckpoint("runs/failed")).fit(module, train_loader)
    """

    FILE_EXTENSION: ClassVar[str] = ".ckpt"
    path_attributes = ("dirpath",)

    def __init__(self, dirpath: str | Path, filename: str = "on_exception") -> None:
        if not filename:
            raise ConfigError(f"filename must be a name without an extension, got {filename!r}.")
        self.dirpath, self.filename = str(any_path("dirpath", dirpath)), filename
        self._is_training = False

    @property
    def ckpt_path(self) -> str:
        """The path of the checkpoint."""
        return str(as_path(self.dirpath) / (self.filename + self.FILE_EXTENSION))

    def check_strategy(self, strategy: Strategy, world_size: int, num_devices: int) -> None:
        """Refuse several processes."""
        refuse_several("OnExceptionCheckpoint", world_size)

    def on_train_start(self, trainer: Run, module: nn.Module) -> None:
        """Note that there is something to save."""
        self._is_training = True

    def on_exception(self, trainer: Run, module: nn.Module, exception: BaseException) -> None:
        """Save the state after the completed steps."""
        if self._is_training and not isinstance(exception, CheckpointError):
            trainer.save_checkpoint(self.ckpt_path)
        self._is_training = False

    def on_train_end(self, trainer: Run, module: nn.Module) -> None:
        """Note that training is over: a later error does not change what there is to save."""
        self._is_training = False


def refuse_several(name: str, world_size: int) -> None:
    """Refuse to save on an exception with several processes.

    Raises:
        ConfigError: if there are.
    """
    if world_size > 1:
        raise ConfigError(
            f"{name} needs world_size=1, got {world_size}: after an error on one rank, the others cannot save a "
            "checkpoint with it; give ModelCheckpoint(every_n_train_steps=...), or use an ElasticStrategy."
        )
