"""Subclasses of DataLoader keep what they override: their iterators, and the batches that these yield."""

from itertools import chain
from typing import Any

import pytest
import torch
from in_step import on_ranks
from resuming import NUM_SAMPLES, Numbered, Run, Small, assert_exact, fit, numbered
from small import Regression, indices, quiet, samples
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from echelon import DataError, seed_everything
from echelon.trainer.data.stream import Cut
from echelon.trainer.data.train_data import TrainData


def negated(batches):
    for x, number in batches:
        yield -x, number


class OwnIterator(DataLoader):
    def _get_iterator(self):
        return negated(super()._get_iterator())


class OwnIter(DataLoader):
    def __iter__(self):
        return negated(super().__iter__())


class Lazy(DataLoader):
    """Begins with its first batch."""

    def __iter__(self):
        yield from super().__iter__()


class OwnSampler(DataLoader):
    """Leaves out the first two samples of each batch."""

    @property
    def _index_sampler(self):
        return [batch[2:] for batch in super()._index_sampler]


class Repeating:
    """As in ultralytics and timm: a batch sampler that never ends."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class Keeping(DataLoader):
    """Reads every epoch from the iterator that its subclass keeps."""

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


class Infinite(Keeping):
    """As in ultralytics: one iterator for all epochs, so that workers stay."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        object.__setattr__(self, "batch_sampler", Repeating(self.batch_sampler))
        self.iterator = DataLoader.__iter__(self)


class InfiniteNegated(Infinite):
    def __iter__(self):
        return negated(super().__iter__())


class MultiEpochs(Keeping):
    """As in timm."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._DataLoader__initialized = False
        self.batch_sampler = Repeating(self.batch_sampler)
        self._DataLoader__initialized = True
        self.iterator = DataLoader.__iter__(self)


@pytest.mark.parametrize("kind", [OwnIterator, OwnIter, Infinite, InfiniteNegated, MultiEpochs])
def test_a_subclass_yields_its_batches_in_the_order_of_a_plain_loader(memory_path, kind):
    def run(kind, name):
        seed_everything(1)
        loader = kind(Numbered(), batch_size=3, shuffle=True)
        seed_everything(1)
        record = fit(Run(Seen(), loader, None, {"limit_train_batches": 4}), memory_path / name)
        return record.samples

    class Seen(Small):
        def ids(self, batch):
            sign = -1 if kind in (OwnIterator, OwnIter, InfiniteNegated) else 1
            assert torch.equal(batch[0][:, 0] * sign > 0, batch[1] > 0)
            return batch[1].tolist()

    assert run(kind, "own") == plain_samples(memory_path)


def plain_samples(memory_path):
    seed_everything(1)
    return fit(Run(Small(), numbered(), None, {"limit_train_batches": 4}), memory_path / "plain").samples


@pytest.mark.sweep
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [OwnIterator, InfiniteNegated, Lazy])
def test_a_subclass_reads_on(memory_path, kind, workers):
    def build():
        loaders.append(kind(Numbered(), batch_size=3, shuffle=True, num_workers=workers))
        return Run(Small(), loaders[-1])

    loaders: list[Any] = []
    assert_exact(build, memory_path, [4, 5, 7] if not workers else [7])
    for loader in loaders if kind is InfiniteNegated and workers else ():
        loader.iterator._shutdown_workers()  # those that it began for itself, which the garbage collector ends late


@pytest.mark.sweep
def test_an_endless_loader_keeps_the_batches_of_its_batch_sampler(memory_path):
    def build():
        batches = BatchSampler(RandomSampler(range(NUM_SAMPLES)), 3, drop_last=False)
        return Run(Small(), Infinite(Numbered(), batch_sampler=batches))

    whole = assert_exact(build, memory_path, [2, 7])
    for start in (0, 5):
        read = chain.from_iterable(ids for _, ids in whole.samples[start : start + 5])
        assert sorted(read) == list(range(NUM_SAMPLES))


def test_an_endless_loader_is_evaluated_once():
    module = Regression()
    quiet(max_epochs=2).fit(module, Infinite(samples(8), 3), Infinite(samples(8), 3))
    assert indices(module.validated) == indices(module.seen) == [[0, 1, 2], [3, 4, 5], [6, 7]] * 2


def test_ranks_divide_what_an_endless_loader_reads():
    def read(ranks):
        data = TrainData(Infinite(samples(11), 2), seed=0, cut=Cut(1, None, ranks), limit=1.0, in_order=False)
        epochs = []
        for epoch in range(2):
            data.begin_epoch(epoch)
            epochs.append(indices([micro_batch.batch for window in data.windows(0) for micro_batch in window]))
        return epochs

    assert on_ranks(2, read) == [[[[0, 1], [4, 5], [8, 9]]] * 2, [[[2, 3], [6, 7], [10]]] * 2]


def test_a_sampler_of_the_class_is_used():
    module = Regression()
    batches = BatchSampler(SequentialSampler(range(8)), 4, drop_last=False)
    quiet(max_epochs=1).fit(module, OwnSampler(samples(8), batch_sampler=batches))
    assert indices(module.seen) == [[2, 3], [6, 7]]


class Elsewhere(DataLoader):
    def __iter__(self):
        return iter([self.dataset[:2]])


def test_a_loader_that_reads_without_its_sampler_is_named():
    with pytest.raises(DataError, match="Elsewhere yields batches without drawing indices from its sampler"):
        quiet(max_epochs=1).fit(Regression(), Elsewhere(samples(8), 2))
