"""Loaders with state of their own (torchdata's StatefulDataLoader, or the user's) are resumed from that state."""

import numpy as np
import pytest
import torch
from resuming import Numbered, Run, Small, assert_exact, fit
from small import Regression, flat, quiet, samples
from torch.utils.data import DataLoader, IterableDataset

from echelon import CombinedLoader, seed_everything


def augment(x):
    return x + torch.randn(2) + float(np.random.randn())


class Counted(IterableDataset):
    """Numbers that are changed at random; knows how far it has been read."""

    def __init__(self, size=12, augment=augment):
        self.size, self.augment, self.next, self.reads = size, augment, 0, 0

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        self.next = max(self.next, first)
        while self.next < self.size:
            index, self.next = self.next, self.next + step
            self.reads += 1
            yield self.augment(torch.tensor([index / 10, 1.0 - index / 7])), torch.tensor(index)
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class Mine(DataLoader):
    """A loader of the user's that gives away the state of its data."""

    def state_dict(self):
        return self.dataset.state_dict()

    def load_state_dict(self, state):
        self.dataset.load_state_dict(state)


@pytest.fixture
def stateful():
    return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader


@pytest.mark.sweep
def test_a_loader_of_the_users_reads_on(memory_path):
    assert_exact(lambda: Run(Small(), Mine(Counted(), 3), None), memory_path)


def test_a_loader_of_the_users_reads_nothing_again(memory_path):
    seed_everything(1)
    fit(Run(Small(), Mine(Counted(12), 3), None), memory_path, stop_after=3)
    data = Counted(12)
    fit(Run(Small(), Mine(data, 3), None), memory_path, ckpt_path="last")
    assert data.reads == 2 * 12 - 9


@pytest.mark.sweep
@pytest.mark.parametrize("mode", ["max_size_cycle", "max_size"])
def test_beside_one_that_is_longer(memory_path, mode):
    class Two(Small):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["long"], batch_idx)

        def ids(self, batch):
            return [None if one is None else one[1].tolist() for one in batch.values()]

    def build():
        loaders = {"long": DataLoader(Numbered(15), 3, shuffle=True), "short": Mine(Counted(4), 2)}
        return Run(Two(), CombinedLoader(loaders, mode), None, {"limit_train_batches": 5})

    assert_exact(build, memory_path)


def unchanged():
    """Samples as they are: what workers draw for an iterable data set is not saved by anybody."""
    return Counted(augment=torch.clone)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:.*set_vital")
@pytest.mark.parametrize(
    ("data", "workers"),
    [(Counted, 0), (unchanged, 2), (lambda: Numbered(14, augment), 0), (lambda: Numbered(14, augment), 2)],
)
def test_a_stateful_data_loader_reads_on(memory_path, stateful, data, workers):
    steps = [2, 5] if workers else [2, 4, 5, 7]
    assert_exact(lambda: Run(Small(), stateful(data(), 3, num_workers=workers), None), memory_path, steps)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:.*set_vital")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_data_loader_that_shuffles_reads_on(memory_path, stateful, workers):
    def build():
        return Run(Small(), stateful(Numbered(14, augment), 3, shuffle=True, num_workers=workers), None)

    assert_exact(build, memory_path, [2, 5] if workers else [2, 4, 5, 7])


@pytest.mark.filterwarnings("ignore:.*set_vital")
def test_a_stateful_data_loader_is_shuffled_as_torchs(stateful):
    def read(kind, **options):
        module, loader = Regression(), kind(samples(), 2, **options)
        seed_everything(1)
        quiet(max_epochs=2).fit(module, loader)
        return flat(module.seen)

    for options in ({"shuffle": True}, {"shuffle": True, "generator": torch.Generator().manual_seed(3)}):
        assert read(stateful, **options) == read(DataLoader, **options)


class OwnGenerator(torch.utils.data.Sampler):
    """Cannot do without its generator."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(5)

    def __iter__(self):
        self.generator.get_state()
        return iter(torch.randint(14, (12,), generator=self.generator).tolist())

    def __len__(self):
        return 12


@pytest.mark.sweep
def test_a_sampler_that_needs_its_generator_is_resumed(memory_path):
    assert_exact(lambda: Run(Small(), DataLoader(Numbered(14), 3, sampler=OwnGenerator()), None), memory_path)
