"""Problems that data causes in training come with a remedy: an endless epoch, one sample in BatchNorm."""

import time

import pytest
import torch
from small import Regression, loader, quiet, raises
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from echelon import Callback, DataError


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            time.sleep(0.02)
            yield torch.ones(2), torch.ones(1)


class OnceWarned(Callback):
    """Ends training some steps after a warning."""

    def __init__(self, caught):
        self.caught, self.remaining = caught, 10

    def on_train_step_end(self, trainer, module):
        self.remaining -= bool(self.caught)
        trainer.should_stop = self.remaining == 0


def test_an_endless_epoch_without_a_limit_is_pointed_out_once():
    def fit_until(caught):
        trainer = quiet(max_epochs=2, callbacks=[OnceWarned(caught)], log_every_n_steps=2)
        trainer.fit(Regression(), DataLoader(Endless(), 2))

    with pytest.warns(UserWarning, match=r"Epoch 0 has had \d+ batches.*no length.*max_steps, max_time") as caught:
        fit_until(caught)
    assert len(caught) == 1


def test_an_endless_epoch_with_a_limit_is_nobodys_mistake():
    quiet(max_time={"seconds": 6}, log_every_n_steps=2).fit(Regression(), DataLoader(Endless(), 2))


class Normalised(Regression):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))


@pytest.mark.parametrize("devices", [1, 2])
def test_one_sample_in_a_batch_norm_is_explained(devices):
    ranks = {"strategy": "ddp", "devices": devices} if devices > 1 else {}
    with raises(DataError, "BatchNorm", "got batch 1 of epoch 0 with 1 sample on rank", "drop_last=True"):
        quiet(max_epochs=1, **ranks).fit(Normalised(), loader(4 * devices - 1, 2))
