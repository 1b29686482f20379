"""Workers read a data set that knows the epoch which is read, however they were started and told."""

import pytest
import torch
from small import Regression, quiet
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from echelon import TrainModule


class Staged(Dataset):
    """Samples that are the epoch of the data set."""

    def __init__(self):
        self.epoch = 0

    def advance(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((1,), float(self.epoch))


class Told(Staged):
    """It is told the epoch by itself."""

    def set_epoch(self, epoch):
        self.epoch = epoch


class Stream(IterableDataset):
    """The same, as a stream that each worker reads a part of."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = get_worker_info()
        yield from (torch.full((1,), float(self.epoch)) for _ in range(8 // (info.num_workers if info else 1)))


class Telling(Sampler):
    """A sampler that is told the epoch, and tells its data set."""

    def __init__(self, dataset):
        self.dataset = dataset

    def set_epoch(self, epoch):
        self.dataset.advance(epoch)

    def __len__(self):
        return 8

    def __iter__(self):
        return iter(range(8))


class Noting(Regression):
    def training_step(self, batch, batch_idx):
        self.seen += batch.flatten().tolist()
        return self.net.weight.square().sum()


def told():
    return {"dataset": Told()}


def telling():
    dataset = Staged()
    return {"dataset": dataset, "sampler": Telling(dataset)}


def stream():
    return {"dataset": Stream()}


@pytest.mark.parametrize(
    ("make", "workers", "persistent"),
    [(told, 0, False), (told, 1, False), (told, 1, True), (telling, 0, False), (telling, 1, False), (stream, 1, True)],
)
def test_workers_read_the_data_set_of_the_epoch(make, workers, persistent):
    module: TrainModule = Noting()
    loader = DataLoader(**make(), batch_size=4, num_workers=workers, persistent_workers=persistent)
    quiet(max_epochs=3).fit(module, loader)
    assert module.seen == [0.0] * 8 + [1.0] * 8 + [2.0] * 8
