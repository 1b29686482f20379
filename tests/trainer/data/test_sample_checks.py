"""Runs that read other samples than they should say so: ranks that disagree, copied streams, other data at a resume."""

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from resuming import Numbered, Run, Small, fit, numbered
from small import Regression, quiet, samples
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, get_worker_info

from echelon import DataError, Engine, Trainer, seed_everything
from echelon.testing import run_ranks
from echelon.trainer.data.sample_checks import content_of


class Anew(Sampler):
    """Makes an unseeded generator in each epoch."""

    def __iter__(self):
        return iter(np.random.default_rng().permutation(64).tolist())

    def __len__(self):
        return 64


class Files(Dataset):
    """Samples by the names of their files."""

    def __init__(self, names, folder="data"):
        self.files = [f"{folder}/{name}.png" for name in names]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        x = torch.tensor([float(Path(self.files[index]).stem)])
        return x.expand(2), x


class Stream(IterableDataset):
    def __init__(self, *, divides=None, value=None):
        self.divides, self.value = divides, value

    def __iter__(self):
        for index in range(16):
            if self.divides is None or self.divides(index):
                x = torch.full((1,), float(index if self.value is None else self.value))
                yield x.expand(2), x


class Repeating(IterableDataset):
    """A stream whose first samples do not tell whether it divides itself."""

    def __iter__(self):
        for index in range(16):
            yield torch.tensor([0.5, 1.0]), torch.full((1,), float(index // 8))


def trainer_of(**settings: Any) -> Trainer:
    return quiet(max_epochs=1, strategy="ddp", devices=2, **settings)


def said(data: Any, **settings: Any) -> list[str]:
    """Return what a fit on this data says, as warnings or in its error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer_of(**settings).fit(Regression(), data)
        except DataError as error:
            return [str(error)]
    return [str(one.message) for one in caught]


def what_ranks_say() -> dict[str, list[str]]:
    rank, names = int(os.environ["RANK"]), range(16)
    engine = Engine(strategy="ddp", devices=2, accelerator="cpu")
    loader = engine.setup_dataloaders(DataLoader(samples(64), 4, sampler=Anew()))
    with pytest.raises(DataError) as caught:
        next(iter(loader))
    return {
        "orders": said(DataLoader(samples(64), 4, sampler=Anew())),
        "orders in an engine": [str(caught.value)],
        "sizes": said(DataLoader(samples(16 + rank), 4)),
        "files": said(DataLoader(Files(names if rank else names[::-1]), 4)),
        "the same files elsewhere": said(DataLoader(Files(names, f"/scratch/{rank}"), 4)),
        "whole streams": said(DataLoader(Stream(), 4)),
        "unclear": said(DataLoader(Repeating(), 4)),
        "meant": said(DataLoader(Stream(), 4), use_distributed_sampler=False),
        "divided streams": said(DataLoader(Stream(divides=lambda index: index % 2 == rank), 4)),
        "equal samples": said(DataLoader(Stream(value=1), 4)),
        "shuffled": said(DataLoader(samples(64), 4, shuffle=True)),
    }


def test_ranks_that_read_other_samples_than_they_should_are_named():
    first, second = run_ranks(what_ranks_say, 2, timeout=180)
    for found in (first, second):
        for kind in ("orders", "orders in an engine"):
            (error,) = found[kind]
            assert error.startswith(
                "Ranks 0 and 1 draw different orders from DataLoader of TensorDataset in epoch 0: at position "
            )
        assert "of 16 and of 17 samples" in found["sizes"][0]
    assert "different samples under the same indices in DataLoader of Files (16 samples)" in first["files"][0]
    assert "Stream is dealt batch by batch: each of 2 readers" in first["whole streams"][0]
    assert "Ranks 0 and 1 got the same first batch from DataLoader of Repeating" in first["unclear"][0]
    quiet_kinds = ["the same files elsewhere", "meant", "divided streams", "equal samples", "shuffled"]
    assert {kind: first[kind] for kind in quiet_kinds} == {kind: [] for kind in quiet_kinds}


def test_a_stream_that_each_worker_reads_whole_is_named():
    def of_worker(index):
        return index // 2 % 2 == get_worker_info().id

    with pytest.warns(
        UserWarning, match="The first batches from the 2 workers of DataLoader of Repeating are the same"
    ):
        quiet(max_epochs=1).fit(Regression(), DataLoader(Repeating(), 2, num_workers=2))
    quiet(max_epochs=1).fit(Regression(), DataLoader(Stream(divides=of_worker), 2, num_workers=2))


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (lambda: numbered(14), lambda: numbered(20), "it has 14 and 20 samples now"),
        (
            lambda: DataLoader(Files(range(14)), 3),
            lambda: DataLoader(Files(range(14)[::-1]), 3),
            "it has the same number of samples, but others now",
        ),
        (
            lambda: numbered(64, shuffle=False, sampler=Anew()),
            lambda: numbered(64, shuffle=False, sampler=Anew()),
            "draws another order than before the checkpoint in epoch 0: at position",
        ),
    ],
    ids=["size", "files", "order"],
)
def test_a_resume_on_other_data_says_so(memory_path, before, after, says):
    seed_everything(1)
    fit(Run(Files14(), before()), memory_path, stop_after=2)
    with pytest.warns(UserWarning, match=says):
        fit(Run(Files14(), after()), memory_path, ckpt_path="last", stop_after=4)


class Files14(Small):
    def loss(self, batch):
        return super().loss((batch[0], batch[1].flatten()))


def test_the_content_of_a_data_set_is_what_is_known_without_reading_it():
    tensors = TensorDataset(torch.arange(8.0), torch.ones(8))
    assert content_of(tensors) == content_of(TensorDataset(torch.arange(8.0), torch.ones(8))) != ""
    assert content_of(tensors) != content_of(TensorDataset(torch.arange(8.0).flip(0), torch.ones(8)))
    assert content_of(torch.utils.data.Subset(tensors, [0, 3])) != content_of(torch.utils.data.Subset(tensors, [3, 0]))
    assert content_of(Files(range(4), "a")) == content_of(Files(range(4), "/b/c")) != content_of(Files(range(1, 5)))
    data = Numbered(3)
    data[0], data[1], data[2]
    assert data.reads == [0, 1, 2]
    assert content_of(data) == content_of(Numbered(3)) == content_of(object()) == content_of([]) == ""


def test_data_that_changes_between_epochs_is_noted_in_the_log(memory_path, caplog):
    seed_everything(1)
    fit(Run(Files14(), numbered(14), None, {"max_epochs": 1}), memory_path)
    fit(Run(Files14(), numbered(20)), memory_path, ckpt_path="last")
    assert "other training data in DataLoader of Numbered: it has 14 and 20 samples now." in caplog.text
