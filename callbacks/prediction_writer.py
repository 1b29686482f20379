"""BasePredictionWriter: write predictions after each batch, or all of them at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

from torch import nn

from ..common.errors import ConfigError, did_you_mean
from .callback import Callback
from .run import Run

_INTERVALS: Final = ("batch", "epoch", "batch_and_epoch")


class BasePredictionWriter(Callback):
    """Override `write_on_batch_end`, `write_on_epoch_end` or both to write predictions.

    `write_on_batch_end` is called on every rank with that rank's batches: write each batch or each rank to a file of
    its own. If several ranks share one replica, it is called only on the first. `write_on_epoch_end` is called on rank
    0 with the predictions of all ranks, in dataset order (in Lightning, on every rank with its own). Neither
    communicates.

    Args:
        write_interval: write after each ``batch``, at the end of the ``epoch``, or both: ``batch_and_epoch``.

    Raises:
        ConfigError: for an unknown interval.

    Example::

        class ToFiles(BasePredictionWriter):
            def write_on_batch_end(self, trainer, module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
                torch.save(prediction, f"predictions-{batch_idx}.pt")

        Trainer(callbacks=ToFiles()).predict(module, test_loader, return_predictions=False)
    """

    def __init__(self, write_interval: Literal["batch", "epoch", "batch_and_epoch"] = "batch") -> None:
        if write_interval not in _INTERVALS:
            raise ConfigError(
                f"`write_interval` should be one of {list(_INTERVALS)}, got {write_interval!r}."
                f"{did_you_mean(str(write_interval), _INTERVALS)}"
            )
        self.interval = write_interval

    def setup(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Check that what is called to write is overridden, before anything is predicted."""
        needed = {"write_on_batch_end": self.interval != "epoch", "write_on_epoch_end": self.writes_epoch}
        for method, is_needed in needed.items() if stage == "predict" else ():
            if is_needed and getattr(type(self), method) is getattr(BasePredictionWriter, method):
                raise NotImplementedError(self._missing(method))

    @property
    def writes_epoch(self) -> bool:
        """Whether predictions are kept until the end of the epoch, also with ``return_predictions=False``."""
        return self.interval != "batch"

    def write_on_batch_end(
        self,
        trainer: Run,
        module: nn.Module,
        prediction: Any,
        batch_indices: Sequence[int],
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write what ``predict_step`` returned for one batch.

        Args:
            batch_idx: the index of the batch in its loader, over all ranks.
            batch_indices: the data set indices of the samples; empty for a loader that is not read by index.
        """
        raise NotImplementedError(self._missing("write_on_batch_end"))

    def write_on_epoch_end(
        self, trainer: Run, module: nn.Module, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """Write the predictions of all ranks: a list of batches, or for several loaders a list of such lists.

        Args:
            batch_indices: for each loader, even if there is only one, a list with the indices of each batch.
        """
        raise NotImplementedError(self._missing("write_on_epoch_end"))

    def _missing(self, method: str) -> str:
        return f"{type(self).__name__}(write_interval={self.interval!r}) does not override {method}; define it."

    def on_predict_batch_end(
        self, trainer: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Write this batch, unless all are written at the end."""
        is_first = trainer.strategy.ranks.data.ranks[0] == 0  # of the ranks that made this prediction
        if self.interval != "epoch" and is_first:
            self.write_on_batch_end(trainer, module, outputs, trainer.batch_indices, batch, batch_idx, dataloader_idx)

    def on_predict_epoch_end(self, trainer: Run, module: nn.Module) -> None:
        """Write all predictions on rank 0, unless batches are written one by one."""
        if self.writes_epoch and trainer.is_global_zero:
            assert trainer.predictions is not None, "predictions are kept until they are written"
            self.write_on_epoch_end(trainer, module, trainer.predictions, trainer.prediction_indices)
