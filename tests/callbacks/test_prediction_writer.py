"""BasePredictionWriter: every prediction reaches the writer, at the interval it asked for."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import Scripted, batches, trainer_in
from small import loader, quiet
from torch.utils.data import DataLoader

from echelon import BasePredictionWriter
from echelon.common.errors import ConfigError


class Writer(BasePredictionWriter):
    def __init__(self, write_interval: Any) -> None:
        super().__init__(write_interval)
        self.batches: list[tuple[int, int, Any]] = []
        self.epochs: list[Sequence[Any]] = []
        self.batch_indices: list[Sequence[int]] = []
        self.epoch_indices: Any = None

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
        self.batch_indices.append(batch_indices)

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        self.epochs.append(predictions)
        self.epoch_indices = batch_indices


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


def test_all_predictions_are_written_where_none_are_returned(tmp_path: Path) -> None:
    writer = Writer("epoch")
    assert predict(tmp_path, writer, return_predictions=False) is None
    assert [[len(batch) for batch in loader] for loader in writer.epochs[0]] == [[2, 2, 2, 2], [2, 2]]


def written_indices(loaders: Any, **settings: Any) -> tuple[Any, Any]:
    writer = Writer("batch_and_epoch")
    quiet(callbacks=[writer], **settings).predict(Predicting(), loaders, return_predictions=False)
    return writer.batch_indices, writer.epoch_indices


def test_the_indices_of_samples_are_those_that_lightning_gives() -> None:
    per_batch = [[0, 1], [2, 3], [4]]
    assert written_indices(loader(5)) == (per_batch, [per_batch])
    assert written_indices([loader(5), loader(3)]) == ([*per_batch, [0, 1], [2]], [per_batch, [[0, 1], [2]]])
    shuffled, _ = written_indices(loader(5, shuffle=True))
    assert sorted(index for batch in shuffled for index in batch) == [0, 1, 2, 3, 4]


def test_a_loader_without_indices_gives_none_to_the_writer() -> None:
    batch = [torch.ones(2, 2), torch.ones(2, 1)]
    assert written_indices(DataLoader([batch, batch], batch_size=None)) == ([[], []], [[[], []]])


def test_rank_0_writes_the_indices_of_all_ranks(tmp_path: Path) -> None:
    class Noting(Writer):
        def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
            (tmp_path / "indices").write_text(f"{batch_indices} {[batch.tolist() for batch in predictions]}")

    trainer = quiet(callbacks=[Noting("epoch")], strategy="ddp", devices=2)
    trainer.predict(Predicting(), loader(5), return_predictions=False)
    assert (tmp_path / "indices").read_text().startswith("[[[0, 1], [2, 3], [4]]] [[0.0,")


def test_an_unknown_interval_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="`write_interval` should be one of .*, got 'batches'. Did you mean 'batch'"):
        Writer("batches")


def test_a_writer_that_does_not_write_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match=r"BasePredictionWriter\(write_interval='batch'\) does not override"):
        predict(tmp_path, BasePredictionWriter("batch"))
