"""A run that is stopped after any step of two epochs reads what an undisturbed one reads, in order, on any layout."""

import itertools

import pytest
import torch
from in_step import on_ranks
from torch.utils.data import DataLoader, IterableDataset

from echelon import Mixture, PackedDataset, TokenBatchSampler
from echelon.trainer.data.index_stream import DataRanks
from echelon.trainer.data.stream import Cut
from echelon.trainer.data.train_data import TrainData

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.* is dealt batch by batch", "ignore:DataLoader cannot skip to a position"),
]

NUM_EPOCHS = 2
TEXTS = [torch.arange(length) + 100 * number for number, length in enumerate([3, 9, 5, 12, 4, 7, 2, 11, 6, 8] * 3)]


class Numbers(IterableDataset):
    """A stream that is told the epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from range(1000 * self.epoch, 1000 * self.epoch + 35)


class Documents(IterableDataset):
    """A stream of texts."""

    def __iter__(self):
        return iter(TEXTS)


def pad(samples):
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1)


def collate(packs):
    return torch.stack([pack["input_ids"] for pack in packs])


def packed(workers):
    return DataLoader(PackedDataset(TEXTS, 16), 2, shuffle=True, num_workers=workers, collate_fn=collate)


def packed_stream(workers):
    return DataLoader(PackedDataset(Documents(), 16, buffer=8), 2, num_workers=workers, collate_fn=collate)


def token_batches(workers):
    batches = TokenBatchSampler([len(text) for text in TEXTS], max_tokens=36, seed=1)
    return DataLoader(TEXTS, batch_sampler=batches, num_workers=workers, collate_fn=pad)


def mixture(workers):
    sources = {"a": (list(range(40)), 0.7), "b": (list(range(100, 109)), 0.3)}
    return DataLoader(Mixture(sources, stop=34), 3, num_workers=workers)


def mixture_of_streams(workers):
    sources = {"a": (list(range(5000, 5020)), 0.6), "s": (Numbers(), 0.4)}
    return DataLoader(Mixture(sources, stop=34), 3, num_workers=workers)


def stream(workers):
    return DataLoader(Numbers(), 3, num_workers=workers)


KINDS = [packed, packed_stream, token_batches, mixture, mixture_of_streams, stream]


def read(kind, num_ranks, workers, stop=None, states=None):
    """Return the samples of all ranks, step by step, and each rank's state after `stop` steps of the run.

    Args:
        kind: makes the loader.
        num_ranks: of this run.
        workers: of each rank.
        stop: the steps to read.
        states: (epoch, batches done, states of all ranks) to go on from.
    """

    def run(ranks):
        data = TrainData(kind(workers), seed=7, cut=Cut(1, None, ranks), limit=1.0, in_order=False)
        epoch, done, saved = states or (0, 0, None)
        steps = []
        for number in range(epoch, NUM_EPOCHS):
            if saved is not None and number == epoch:
                own = saved[ranks.data_rank if len(saved) == ranks.data_size else 0]
                done = data.resume_epoch(number, own, done, saved)
            else:
                done = 0
            data.begin_epoch(number)
            for window in data.windows(done):
                steps.append([sample for micro_batch in window for sample in micro_batch.batch.tolist()])
                done += window.length
                if len(steps) == stop:
                    return steps, (number, done, data.state_dict())
        data.close()
        return steps, None

    results = on_ranks(num_ranks, run, DataRanks())
    by_rank = [steps for steps, _ in results]
    by_step = [list(itertools.chain(*parts)) for parts in itertools.zip_longest(*by_rank, fillvalue=[])]
    after = [state for _, state in results]
    return by_step, None if after[0] is None else (*after[0][:2], [state for _, _, state in after])


def in_order(steps):
    return list(itertools.chain(*steps))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_after_every_step(kind, num_ranks, workers):
    expected, _ = read(kind, num_ranks, workers)
    alone, _ = read(kind, 1, 0)
    assert in_order(expected) == in_order(alone)
    # a resume with workers starts many processes: one stop, another for each number of ranks
    for stop in [len(expected) // num_ranks - 1] if workers else range(1, len(expected)):
        begun, states = read(kind, num_ranks, workers, stop)
        assert begun == expected[:stop]
        rest, _ = read(kind, num_ranks, workers, states=states)
        assert begun + rest == expected
        if not workers:
            others, _ = read(kind, num_ranks % 3 + 1, 0, states=states)
            assert in_order(begun + others) == in_order(alone)
