"""A stream in shards inside a mixture: each reader goes through shards of its own, in one order on any layout."""

import itertools
import warnings

import pytest
import torch
from in_step import on_ranks
from small import raises
from stopped_reading import read, steps_of, train_data
from torch.utils.data import DataLoader, IterableDataset

from echelon import DataError, Mixture
from echelon.trainer.data.index_stream import DataRanks
from echelon.trainer.sequences.stream_cursor import MOST_LANES, num_lanes

A = list(range(40))
NUM_SHARDS = 12
BATCH, STOP = 3, 72


class Shards(IterableDataset):
    """Numbers in shards; it counts what is read of it, in all processes."""

    def __init__(self, parts, reads=None):
        self.parts = parts
        self.reads = torch.zeros(1, dtype=torch.int64).share_memory_() if reads is None else reads

    @classmethod
    def cut(cls, num_shards=NUM_SHARDS, size=60):
        return cls([list(range(1000 + start, 1000 + size, num_shards)) for start in range(num_shards)])

    @property
    def num_shards(self):
        return len(self.parts)

    def shard(self, num_shards, index):
        return type(self)(self.parts[index::num_shards], self.reads)

    def __iter__(self):
        for number in itertools.chain(*self.parts):
            self.reads += 1
            yield number


class StatefulShards(Shards):
    """Shards with a state."""

    position = 0

    def __iter__(self):
        start, self.position = self.position, 0
        for place, number in enumerate(itertools.islice(itertools.chain(*self.parts), start, None), start + 1):
            self.position = place
            self.reads += 1
            yield number
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def loader(stream, workers=0, **options):
    mixture = Mixture({"a": (A, 0.4), "s": (stream, 0.6)}, stop=STOP)
    return DataLoader(mixture, BATCH, num_workers=workers, **options)


def epochs_of(stream, num_ranks, workers=0, num_epochs=3, **options):
    """Return the samples of epochs in order."""

    def run(ranks):
        data, found = train_data(loader(stream, workers, **options), ranks), []
        for epoch in range(num_epochs):
            data.begin_epoch(epoch)
            found.append(steps_of(data, 0)[0])
        data.close()
        return found

    results = on_ranks(num_ranks, run, DataRanks())
    return [list(itertools.chain(*itertools.chain(*zip(*epoch, strict=True)))) for epoch in zip(*results, strict=True)]


ALONE = epochs_of(Shards.cut(), 1)


def streamed(epochs):
    return [number for epoch in epochs for number in epoch if number >= 1000]


def test_each_shard_goes_through_its_samples_before_one_comes_twice():
    stream = Shards.cut()
    assert epochs_of(stream, 1) == ALONE
    drawn = streamed(ALONE)
    assert int(stream.reads) == len(drawn)  # none is read again in the next epoch
    for part in stream.parts:
        own = [number for number in drawn if number in part]
        assert own == [part[place % len(part)] for place in range(len(own))] and len(own) > len(part)


@pytest.mark.parametrize(("num_ranks", "workers"), [(2, 0), (3, 0), (2, 2)])
@pytest.mark.parametrize("kind", [Shards, StatefulShards])
def test_readers_have_shards_of_their_own_and_one_order(kind, num_ranks, workers):
    stream = kind.cut()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that each reader reads all
        assert epochs_of(stream, num_ranks, workers) == ALONE
    if workers and kind is Shards:
        return  # new workers read their part of a pass again, as it has no state
    # the first samples are looked at by each rank, to compare them
    ahead = 8 * num_ranks + 2 * BATCH * workers * num_ranks * 3
    assert len(streamed(ALONE)) <= int(stream.reads) <= len(streamed(ALONE)) + ahead


def test_persistent_workers_go_on():
    assert epochs_of(Shards.cut(), 1, 2, persistent_workers=True) == ALONE


def test_readers_that_do_not_divide_the_shards_skip_and_that_is_said():
    with pytest.warns(UserWarning, match="StreamedMixture is dealt batch by batch: each of 2 readers"):
        assert epochs_of(Shards.cut(5), 2) == epochs_of(Shards.cut(5), 1)


@pytest.mark.parametrize("kind", [Shards, StatefulShards])
@pytest.mark.parametrize(("before", "after"), [((2, 0), (3, 0)), ((3, 0), (1, 0)), ((1, 2), (2, 0)), ((2, 0), (2, 0))])
def test_a_stopped_run_goes_on_in_the_same_order(kind, before, after):
    expected = read(lambda workers: loader(kind.cut(), workers), (1, 0), epoch=1)
    assert expected == ALONE[1]
    for stop in (1, 3):
        assert read(lambda workers: loader(kind.cut(), workers), before, after, stop, epoch=1) == expected


def test_a_resumed_run_reads_no_shard_again():
    def begin(ranks):
        data = train_data(loader(StatefulShards.cut()), ranks)
        data.begin_epoch(0)
        steps_of(data, 0, 9)
        return data.state_dict()

    states = on_ranks(2, begin, DataRanks())
    for num_ranks in (1, 2, 3):
        streams = [StatefulShards.cut() for _ in range(num_ranks)]

        def go_on(ranks, streams=streams):
            data = train_data(loader(streams[ranks.data_rank]), ranks)
            own = states[ranks.data_rank if ranks.data_size == 2 else 0]
            return steps_of(data, data.resume_epoch(0, own, 9, states))[0]

        rest = [number for steps in on_ranks(num_ranks, go_on, DataRanks()) for step in steps for number in step]
        looked = 8 * num_ranks if num_ranks > 1 else 0
        assert sum(int(stream.reads) for stream in streams) == len(streamed([rest])) + looked


def test_another_number_of_shards_is_told():
    def begin(ranks):
        data = train_data(loader(Shards.cut()), ranks)
        data.begin_epoch(0)
        steps_of(data, 0, 2)
        return data.state_dict()

    [state] = on_ranks(1, begin, DataRanks())
    data = train_data(loader(Shards.cut(7)), DataRanks())
    with raises(DataError, "'s' had 12 shards", "got 7"):
        steps_of(data, data.resume_epoch(0, state, 2))


def test_very_many_shards_share_lanes():
    def lanes(num_shards):
        return num_lanes(Shards([[0]] * num_shards))

    assert [lanes(number) for number in (1, 5, MOST_LANES)] == [1, 5, MOST_LANES]
    assert lanes(1024) == 128 and lanes(2000) == 125 and lanes(1009) == MOST_LANES
