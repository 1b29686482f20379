"""Data of the programs drawn at random: samples in some order, batches that stay whole, streams, and two loaders."""

import math
from functools import partial

import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from echelon import CombinedLoader, DataModule

ORDERS = {
    "in order": {},
    "shuffled": {"shuffle": True},
    "a sampler": {"sampler": RandomSampler},
    "with replacement": {"sampler": partial(RandomSampler, replacement=True)},
    "a part": {"sampler": lambda data, generator: SubsetRandomSampler(range(0, len(data), 2), generator)},
    "weighted": {
        "sampler": lambda data, generator: WeightedRandomSampler(
            [1 + index % 3 for index in range(len(data))], len(data), generator=generator
        )
    },
}
SOURCES = ("loader", "data module")
WHOLE = 12
"""The batches of a step where batches stay whole: as many for each of 1, 2, 3 or 4 ranks."""


class Data(DataModule):
    """The data of a program; what it trains on differs from epoch to epoch."""

    def __init__(self, program, num_ranks):
        super().__init__()
        self.program, self.num_ranks = program, num_ranks

    def train_dataloader(self):
        return train_loader(self.program, self.trainer.current_epoch, self.num_ranks)

    def val_dataloader(self):
        return val_loaders(self.program)


class Batches:
    """Draws batches of samples: larger and smaller ones in turn, in another order each epoch."""

    def __init__(self, number, batch):
        self.number, self.batch = number, batch

    def __len__(self):
        return math.ceil(2 * self.number / (2 * self.batch + 1))

    def __iter__(self):
        order = torch.randperm(self.number).tolist()
        sizes = [self.batch + index % 2 for index in range(len(self))]
        for size in sizes:
            if part := order[:size]:
                yield part
            order = order[size:]


class Stream(IterableDataset):
    """Reads samples in an order of its own for each epoch, the same on every rank and in every worker."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return (self.samples[index] for index in torch.randperm(len(self.samples)).tolist())


def data(number, seed):
    """Return sequences of 4, their targets, and how much each counts."""
    x = torch.randn(number, 4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return TensorDataset(x, torch.sin(x.sum(2, keepdim=True)), torch.arange(number) % 3)


def train_loader(program, seed=0, num_ranks=1):
    """Return the training data of a program, in its order; in manual optimization the batches of a rank are a step."""
    samples = data(program.samples, 1 + 100 * seed)
    if program.whole is not None:
        one = whole_batches(program, samples)
        if program.combined is None:
            return one
        other = whole_batches(program, data(1 + program.samples // 2, 7 + 100 * seed))
        return CombinedLoader({"first": one, "second": other}, program.combined)
    order = dict(ORDERS[program.order])
    if "sampler" in order:
        order["sampler"] = order["sampler"](samples, generator=torch.Generator().manual_seed(3 + seed))
    workers = {"num_workers": program.num_workers}
    batch = program.global_batch // num_ranks if program.is_manual else program.batch
    return DataLoader(samples, batch, drop_last=program.drop_last, **workers, **order)


def whole_batches(program, samples):
    """Return a loader of batches that stay whole, in any layout."""
    if program.whole == "batch sampler":
        return DataLoader(samples, batch_sampler=Batches(len(samples), program.batch), num_workers=program.num_workers)
    if program.whole == "stream":
        return DataLoader(Stream(samples), program.batch, drop_last=program.drop_last, num_workers=program.num_workers)
    return DataLoader(list(DataLoader(samples, program.batch)), batch_size=None)


def val_loaders(program):
    """Return the validation data of a program, if it validates."""
    if program.validation is None:
        return None
    loaders = [DataLoader(data(program.val_samples + number, 2 + number), 2) for number in range(program.val_loaders)]
    return loaders if len(loaders) > 1 else loaders[0]
