"""Whatever its data source, an interrupted run continues reading where it stopped: nothing twice, nothing skipped."""

import itertools
import random

import numpy as np
import pytest
import torch
from resuming import NUM_SAMPLES, Numbered, Run, Small, assert_exact, fit, numbered
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, WeightedRandomSampler

from echelon import CombinedLoader, seed_everything


def augment(x):
    """Draw from each generator that augmentations use."""
    return x + torch.randn(2) + random.gauss(0.0, 1.0) + torch.from_numpy(np.random.randn(2).astype("float32"))


class Odd(Sampler):
    """A sampler of the user's that draws from global generators while it is read."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        for _ in range(self.size):
            yield (random.randrange(self.size) + int(torch.randint(self.size, ()))) % self.size

    def __len__(self):
        return self.size


class Uneven(BatchSampler):
    """Batches of different sizes, in an order of their own for each epoch."""

    def __init__(self, size):
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = np.random.RandomState(self.epoch).permutation(self.size).tolist()
        return iter([order[:2], order[2:7], order[7:9], order[9:12], order[12:]])

    def __len__(self):
        return 5


def weighted():
    return WeightedRandomSampler(
        torch.linspace(0.1, 1.0, NUM_SAMPLES).tolist(), NUM_SAMPLES, generator=torch.Generator().manual_seed(5)
    )


def combined(mode):
    loaders = {"a": numbered(augment=augment), "b": [numbered(8, batch_size=2), numbered(5, batch_size=2)]}
    return CombinedLoader(loaders, mode)


class Structured(Small):
    """Reads batches that are structures, some of them over."""

    def flat(self, batch):
        batches = [batch["a"], *batch["b"]]
        return [torch.cat(parts) for parts in zip(*(one for one in batches if one is not None), strict=True)]

    def ids(self, batch):
        return [None if one is None else one[1].tolist() for one in (batch["a"], *batch["b"])]

    def training_step(self, batch, batch_idx):
        return super().training_step(self.flat(batch), batch_idx)


LOADERS = {
    "random augmentation": lambda: numbered(augment=augment),
    "a sampler that draws": lambda: numbered(augment=augment, shuffle=False, sampler=Odd(NUM_SAMPLES)),
    "a weighted sampler": lambda: numbered(shuffle=False, sampler=weighted()),
    "a batch sampler": lambda: DataLoader(Numbered(augment=augment), batch_sampler=Uneven(NUM_SAMPLES)),
    "a generator given": lambda: numbered(augment=augment, generator=torch.Generator().manual_seed(3)),
    "in order": lambda: numbered(augment=augment, shuffle=False),
}


@pytest.mark.sweep
@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_reads_on(memory_path, kind):
    build = LOADERS[kind]
    settings = {"max_epochs": 2, "accumulate_grad_batches": 2 if kind == "random augmentation" else 1}
    assert_exact(lambda: Run(Small(), build(), None, settings), memory_path)


@pytest.mark.sweep
@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}, {"prefetch_factor": 3, "in_order": True}])
def test_workers_read_on(memory_path, options):
    build = lambda: Run(Small(), numbered(augment=augment, num_workers=2, **options), None)  # noqa: E731
    assert_exact(build, memory_path, [3, 5] if not options else [7])


def test_workers_and_none_read_the_same(memory_path):
    runs = []
    for workers in (0, 2):
        seed_everything(1)
        run = Run(Small(), numbered(augment=augment, num_workers=workers), None)
        runs.append(fit(run, memory_path / str(workers)).losses)
    assert runs[0] == runs[1]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("mode", "accumulate"), [("max_size_cycle", 1), ("max_size_cycle", 2), ("max_size", 1), ("min_size", 1)]
)
def test_several_loaders_read_on(memory_path, mode, accumulate):
    settings = {"max_epochs": 2, "accumulate_grad_batches": accumulate}
    assert_exact(lambda: Run(Structured(), combined(mode), None, settings), memory_path)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_began_again_inside_a_step_reads_on(memory_path, workers):
    def build():
        short = numbered(7, batch_size=2, augment=augment, num_workers=workers)
        return Run(Structured(), {"a": numbered(22, batch_size=2), "b": [short]}, None, settings)

    settings = {"max_epochs": 2, "accumulate_grad_batches": 3}
    assert_exact(build, memory_path, [2, 3])


@pytest.mark.sweep
def test_loaders_one_after_another_read_on(memory_path):
    def build():
        loaders = [numbered(6, batch_size=2), numbered(8, batch_size=2)]
        return Run(Small(), CombinedLoader(loaders, "sequential"), None)

    assert_exact(build, memory_path)


def test_every_sample_of_an_epoch_is_read_once_across_the_interruption(memory_path):
    whole = assert_exact(lambda: Run(Small(), numbered(augment=augment), None), memory_path, [])
    epochs = [sorted(itertools.chain(*(ids for _, ids in whole.samples[start : start + 5]))) for start in (0, 5)]
    assert epochs == [list(range(NUM_SAMPLES))] * 2


# --- data without indices


class Stream(IterableDataset):
    """Numbers in an order that it draws, changed at random."""

    def __init__(self, augment=None):
        self.augment, self.reads = augment, 0

    def __iter__(self):
        for index in torch.randperm(NUM_SAMPLES).tolist():
            self.reads += 1
            x = torch.tensor([index / 10, 1.0 - index / 7])
            yield (x if self.augment is None else self.augment(x)), torch.tensor(index)


class Stateful:
    """A loader that knows where it is, over data of its own."""

    def __init__(self):
        self.epoch, self.position, self.reads = 0, 0, 0

    def __iter__(self):
        order = np.random.RandomState(self.epoch).permutation(12).tolist()
        while self.position < 12:
            ids = torch.tensor(order[self.position : self.position + 3])
            self.position += 3
            self.reads += 1
            yield torch.stack([ids / 10, 1 - ids / 7], 1), ids
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position = state["epoch"], state["position"]


@pytest.mark.sweep
def test_a_loader_with_a_state_reads_on(memory_path):
    assert_exact(lambda: Run(Small(), Stateful(), None), memory_path)


def test_a_loader_with_a_state_reads_nothing_again(memory_path):
    seed_everything(1)
    fit(Run(Small(), Stateful(), None), memory_path, stop_after=3)
    loader = Stateful()
    fit(Run(Small(), loader, None), memory_path, ckpt_path="last")
    assert loader.reads == 8 - 3


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:DataLoader cannot skip to a position", "ignore:Stream is dealt batch by batch")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_without_a_state_is_read_again_to_the_same_place(memory_path, workers):
    def build():
        return Run(Small(), DataLoader(Stream(augment), 3, num_workers=workers), None)

    assert_exact(build, memory_path, [3, 7] if workers else None)


def test_a_stream_that_is_read_again_says_so(memory_path):
    seed_everything(1)
    build = lambda: Run(Small(), DataLoader(Stream(), 3), None)  # noqa: E731
    fit(build(), memory_path, stop_after=3)
    with pytest.warns(UserWarning, match="its first 3 batches are read again and discarded"):
        fit(build(), memory_path, ckpt_path="last")
