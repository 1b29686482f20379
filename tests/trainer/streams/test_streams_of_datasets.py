"""Streaming data sets of Hugging Face are dealt by their shards, mixed, and resumed, without a line of the user."""

import itertools
import warnings

import pytest
import stopped_reading
import torch
from in_step import on_ranks
from stopped_reading import steps_of, train_data
from sweep import dealt
from torch.utils.data import DataLoader

from echelon import Mixture
from echelon.trainer.data.index_stream import DataRanks

datasets = pytest.importorskip("datasets")

SIZE = 41


def numbers(shards):
    for shard in shards:
        yield from ({"number": number} for number in range(shard, SIZE, 8))


def stream(num_shards=8, shuffled=False):
    shards = list(range(8))
    kwargs = {"shards": shards} if num_shards == 8 else {"shards": (tuple(shards),)}
    function = numbers if num_shards == 8 else all_numbers
    data = datasets.IterableDataset.from_generator(function, gen_kwargs=kwargs)
    return data.shuffle(seed=3, buffer_size=5) if shuffled else data


def all_numbers(shards):
    yield from ({"number": number} for number in range(SIZE))


def collate(rows):
    return torch.tensor([row["number"] for row in rows])


def loader_of(dataset, workers=0):
    return DataLoader(dataset, 3, num_workers=workers, collate_fn=collate)


def read(make, before, after=None, stop=None, epoch=0):
    return stopped_reading.read(lambda workers: loader_of(make(), workers), before, after, stop, epoch=epoch)


@pytest.mark.parametrize("layout", [(1, 0), (2, 0), (2, 2), (3, 1)])
def test_shards_are_dealt_to_ranks_and_workers(layout):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sorted(read(stream, layout)) == list(range(SIZE))
        shuffled = [read(lambda: stream(shuffled=True), layout, epoch=epoch) for epoch in (0, 1)]
    assert [sorted(epoch) for epoch in shuffled] == [list(range(SIZE))] * 2
    assert shuffled[0] != shuffled[1]


@pytest.mark.parametrize("change", [lambda data: data, lambda data: data.map(dict).filter(bool).take(SIZE)])
def test_shards_of_a_shuffled_stream_are_read_at_random(change):
    def one_by_one():
        return change(datasets.IterableDataset.from_generator(numbers, gen_kwargs={"shards": list(range(8))}))

    in_order = read(one_by_one, (1, 0))
    shuffled = [read(lambda: change(one_by_one().shuffle(3, buffer_size=1)), (1, 0), epoch=epoch) for epoch in (0, 1)]
    assert in_order == [number for first in range(8) for number in range(first, SIZE, 8)]
    assert [sorted(epoch) for epoch in shuffled] == [list(range(SIZE))] * 2
    assert in_order not in shuffled
    assert shuffled[0] != shuffled[1]


@pytest.mark.filterwarnings("ignore:IterableDataset is dealt batch by batch")
@pytest.mark.parametrize("layout", [(2, 0), (2, 2), (1, 2)])
def test_one_shard_is_dealt_batch_by_batch(layout):
    found = read(lambda: stream(1), layout)
    assert sorted(found) == list(range(SIZE))
    if layout[0] == 2:
        assert found == list(range(SIZE))


LAYOUTS = [((1, 0), (1, 0)), ((2, 2), (2, 2)), ((2, 0), (3, 0)), ((1, 2), (2, 0)), ((3, 0), (1, 2))]


@pytest.mark.sweep
@pytest.mark.parametrize(("layouts", "stop"), dealt(LAYOUTS, (3, 1), [0]))
def test_a_stream_goes_on_without_loss(layouts, stop):
    before, after = layouts
    found = read(stream, before, after, stop)
    assert sorted(found) == list(range(SIZE))
    assert before != after or found == read(stream, before)


def test_a_stream_is_mixed_with_a_data_set():
    rows = datasets.Dataset.from_dict({"number": list(range(1000, 1020))})

    def make():
        return Mixture({"rows": (rows, 0.5), "stream": (stream(), 0.5)}, stop=60)

    expected = read(make, (1, 0))
    assert sorted(number for number in expected if number >= 1000)[::30] == [1000]
    assert read(make, (2, 2)) == read(make, (4, 0), (1, 2), 2) == expected


def test_a_stream_that_the_user_has_divided_stays_as_it_is():
    from datasets.distributed import split_dataset_by_node

    def run(ranks):
        data = train_data(loader_of(split_dataset_by_node(stream(), ranks.data_rank, ranks.data_size)), ranks)
        data.begin_epoch(0)
        return list(itertools.chain(*steps_of(data, 0)[0]))

    found = on_ranks(2, run, DataRanks())
    assert sorted(itertools.chain(*found)) == list(range(SIZE))
