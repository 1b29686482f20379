"""BasePredictionWriter: every prediction reaches the writer, when it asked for it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import Scripted, batches, trainer_in

from echelon import BasePredictionWriter
from echelon.strategies.errors import ConfigError, RunError


class Writer(BasePredictionWriter):
    def __init__(self, write_interval: Any) -> None:
        super().__init__(write_interval)
        self.batches: list[tuple[int, int, Any]] = []
        self.epochs: list[Sequence[Any]] = []

    def write_on_batch_end(
        self,
        trainer: Any,
        module: Any,
        prediction: Any,
        batch_indices: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        self.batches.append((dataloader_idx, batch_idx, prediction))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        self.epochs.append(predictions)


class Predicting(Scripted):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return batch[1].squeeze(1)


def predict(folder: Path, writer: BasePredictionWriter, **options: Any) -> Any:
    return trainer_in(folder, writer).predict(Predicting(), [batches(), batches(4)], **options)


@pytest.mark.parametrize(
    ("interval", "num_batches", "num_epochs"), [("batch", 6, 0), ("epoch", 0, 1), ("batch_and_epoch", 6, 1)]
)
def test_predictions_are_written_at_the_interval(
    tmp_path: Path, interval: str, num_batches: int, num_epochs: int
) -> None:
    writer = Writer(interval)
    predictions = predict(tmp_path, writer)
    assert [len(writer.batches), len(writer.epochs)] == [num_batches, num_epochs]
    for dataloader_idx, batch_idx, prediction in writer.batches:
        assert torch.equal(prediction, predictions[dataloader_idx][batch_idx])
    for written in writer.epochs:
        assert [len(loader) for loader in written] == [4, 2]
        assert torch.equal(torch.cat(written[0]), torch.cat(predictions[0]))


def test_batches_are_written_where_none_are_kept(tmp_path: Path) -> None:
    writer = Writer("batch")
    assert predict(tmp_path, writer, return_predictions=False) is None
    assert len(writer.batches) == 6


def test_writing_all_at_once_needs_predictions_that_are_kept(tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match=r"Writer\(write_interval='epoch'\) needs the predictions.*set write_interval='batch'"
    ):
        predict(tmp_path, Writer("epoch"), return_predictions=False)


def test_an_unknown_interval_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="write_interval must be one of .*, got 'batches'. Did you mean 'batch'"):
        Writer("batches")


def test_a_writer_that_does_not_write_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match=r"BasePredictionWriter\(write_interval='batch'\) does not override"):
        predict(tmp_path, BasePredictionWriter("batch"))
