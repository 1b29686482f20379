"""Evaluation on several ranks: the same batches as in one process, each read once, by one rank."""

import itertools
import random

import pytest
import torch
from in_step import on_ranks
from small import Noted, indices, loader, raises, samples
from test_train_data import LISTS, Batches, Sized, Stream
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler

from echelon import CombinedLoader, ConfigError
from echelon.trainer.data.evaluation_data import EvaluationData
from echelon.trainer.data.index_stream import DataRanks
from echelon.trainer.loop.evaluate import in_dataset_order


def evaluated(make, data_size, *, limit=1.0, again=float("inf"), is_dealing=True, steps=(0,), in_order=False):
    """What each rank reads of the first loader at the last of some steps: (batch_idx, samples)."""

    def run(ranks):
        torch.manual_seed(ranks.data_rank)  # ranks have different streams of random numbers
        data = EvaluationData.of(make(ranks), limit, "validate", in_order=in_order, ranks=ranks, seed=7)
        for step in steps:
            read = list(data.batches(0, again, step))
        return [(batch_idx, indices([batch])[0]) for batch_idx, batch, _ in read], data.num_batches

    found = on_ranks(data_size, run, DataRanks(is_dealing=is_dealing))
    assert len({tuple(num_batches) for _, num_batches in found}) == 1
    return [read for read, _ in found], found[0][1]


def together(ranks):
    """The batches of all ranks in the order of their indices, none of which comes twice."""
    return sorted(itertools.chain(*ranks))


class Backwards(Sampler):
    def __iter__(self):
        return iter(range(10, -1, -1))


KINDS = {
    "in order": lambda: loader(11, 2),
    "one batch": lambda: loader(2, 2),
    "drop_last": lambda: loader(11, 2, drop_last=True),
    "workers": lambda: loader(5, 2, num_workers=1),
    "persistent workers": lambda: loader(5, 2, num_workers=1, persistent_workers=True),
    "sampler": lambda: loader(11, 2, sampler=Backwards()),
    "own generator": lambda: loader(11, 2, shuffle=True, generator=torch.Generator().manual_seed(4)),
    "lists": lambda: DataLoader(samples(11), batch_sampler=LISTS),
    "sampler of lists": lambda: DataLoader(samples(11), batch_size=None, sampler=LISTS),
    "sequence": Batches,
}


@pytest.mark.parametrize("data_size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_together_read_the_batches_of_one_process(kind, data_size):
    one, num_batches = evaluated(lambda _: KINDS[kind](), 1, steps=(3, 4))
    ranks, same_num_batches = evaluated(lambda _: KINDS[kind](), data_size, steps=(3, 4))
    assert together(ranks) == one[0]
    assert num_batches == same_num_batches
    for data_rank, read in enumerate(ranks):
        assert [batch_idx for batch_idx, _ in read] == list(range(data_rank, len(one[0]), data_size))


def test_a_rank_reads_no_sample_of_another():
    data, batches = Noted(11), Batches()
    evaluated(lambda _: DataLoader(data, 2), 3)
    evaluated(lambda _: batches, 3)
    assert sorted(data.reads) == list(range(11))
    assert sorted(batches.reads) == list(range(5))


@pytest.mark.parametrize(
    "make",
    [
        lambda _: loader(11, 2, shuffle=True),
        lambda _: DataLoader(samples(11), batch_sampler=BatchSampler(RandomSampler(range(11)), 2, False)),
        lambda _: CombinedLoader([loader(11, 2, shuffle=True)], "sequential"),
    ],
)
def test_a_shuffle_is_the_same_on_all_ranks_and_another_at_each_step(make):
    ranks, _ = evaluated(make, 3)
    first = [batch for _, batch in together(ranks)]
    assert sorted(itertools.chain(*first)) == list(range(11))
    assert first != [batch for _, batch in together(evaluated(make, 3, steps=(1,))[0])]


def test_overfitting_evaluates_in_order():
    ranks, _ = evaluated(lambda _: loader(11, 2, shuffle=True), 2, limit=3, in_order=True)
    assert together(ranks) == [(0, [0, 1]), (1, [2, 3]), (2, [4, 5])]


@pytest.mark.parametrize(("limit", "again", "count"), [(3, 10, 3), (0.5, 10, 3), (1.0, 2, 2), (5, 1, 1)])
@pytest.mark.parametrize("make", [lambda ranks: loader(12, 2), lambda ranks: Batches(6)])
def test_a_limit_counts_the_batches_of_all_ranks(make, limit, again, count):
    ranks, _ = evaluated(make, 2, limit=limit, again=again)
    assert together(ranks) == [(index, [2 * index, 2 * index + 1]) for index in range(count)]


def test_a_limit_counts_the_batches_of_streams_in_turn():
    ranks, num_batches = evaluated(lambda ranks: DataLoader(Stream(20 * ranks.data_rank, 10), 2), 2, limit=3)
    assert together(ranks) == [(0, [0, 1]), (1, [20, 21]), (2, [2, 3])]
    assert num_batches == [3]


def test_streams_of_different_length_are_read_completely():
    ranks, num_batches = evaluated(
        lambda ranks: DataLoader(Stream(20 * ranks.data_rank, 5 - 4 * ranks.data_rank), 2), 2
    )
    assert together(ranks) == [(0, [0, 1]), (1, [20]), (2, [2, 3]), (4, [4])]
    assert num_batches == [float("inf")]
    ranks, num_batches = evaluated(lambda ranks: Sized((3, 1)[ranks.data_rank]), 2)
    assert together(ranks) == [(0, [0, 1]), (1, [0, 1]), (2, [2, 3]), (4, [4, 5])]
    assert num_batches == [6]


@pytest.mark.parametrize("is_dealing", [True, False])
def test_what_the_user_deals_is_left_alone(is_dealing):
    def make(ranks):
        places = DistributedSampler(range(8), 2, ranks.data_rank, shuffle=False)
        return loader(8, 2, sampler=places if is_dealing else list(places))

    ranks, num_batches = evaluated(make, 2, is_dealing=is_dealing)
    assert ranks == [[(0, [0, 2]), (2, [4, 6])], [(1, [1, 3]), (3, [5, 7])]]
    assert num_batches == [4]


def test_loaders_side_by_side_are_read_in_turn():
    def run(ranks):
        both = CombinedLoader([loader(10, 2, shuffle=True), Batches(2)], "max_size_cycle")
        data = EvaluationData.of(both, 1.0, "validate", ranks=ranks, seed=7)
        torch.manual_seed(ranks.data_rank)
        return [(index, [indices([part])[0] for part in batch]) for index, batch, _ in data.batches(0, 9, 0)]

    for data_size in (2, 3):
        read = together(on_ranks(data_size, run))
        assert [index for index, _ in read] == list(range(5))
        assert sorted(itertools.chain(*(first for _, (first, _) in read))) == list(range(10))
        assert [second for _, (_, second) in read] == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]]


def test_random_numbers_of_the_process_are_left_alone_by_what_is_dealt():
    def drawn_after(data_size):
        def run(ranks):
            random.seed(1)
            data = EvaluationData.of(loader(11, 2, shuffle=True), 1.0, "validate", ranks=ranks, seed=7)
            list(data.batches(0, 9, 0))
            return random.random()

        return on_ranks(data_size, run)

    assert set(drawn_after(3)) == {random.Random(1).random()}


def test_a_fraction_of_an_unknown_length_is_refused_on_all_ranks():
    with raises(ConfigError, "no length", "`Trainer(limit_val_batches)`", "got 0.5"):
        evaluated(lambda ranks: DataLoader(Stream(0, 4), 2), 2, limit=0.5)


def test_predictions_of_all_ranks_come_in_the_order_of_the_data():
    ranks = [
        [[(0, "a"), (2, "c")], []],
        [[(1, "b"), (3, None)], [(1, "y")]],
        [[(2, "c")], [(0, "x")]],
    ]
    assert in_dataset_order(ranks) == [["a", "b", "c", None], ["x", "y"]]
    assert in_dataset_order([[[(0, 5)]]]) == [[5]]


class Drawing(Sampler):
    """Draws random numbers when an iteration begins."""

    def __init__(self):
        self.drawn = []

    def __iter__(self):
        self.drawn = torch.randperm(5).tolist()
        return iter(self.drawn)


def read_of(source, data_size=1):
    def run(ranks):
        data = EvaluationData.of(source, 1.0, "validate", ranks=ranks, seed=7)
        return [tuple(each) for each in data.batches(0, 9, 0)]

    return together(on_ranks(data_size, run))


@pytest.mark.parametrize("data_size", [1, 2])
def test_batches_come_with_the_indices_of_their_samples(data_size):
    for kind in ("in order", "workers", "persistent workers", "lists", "sampler of lists", "sampler"):
        for _, batch, drawn_indices in read_of(KINDS[kind](), data_size):
            assert indices([batch]) == [drawn_indices]
    for kind in ("sequence",):
        assert {drawn_indices for *_, drawn_indices in read_of(KINDS[kind](), data_size)} == {None}


@pytest.mark.parametrize("in_batches", [False, True])
def test_one_rank_reads_with_the_random_numbers_of_the_loader_itself(in_batches):
    sampler = Drawing()

    def make():
        return DataLoader(samples(5), batch_size=2 if in_batches else None, sampler=sampler)

    torch.manual_seed(3)
    expected, after = [batch[1].tolist() for batch in make()], torch.rand(1)
    torch.manual_seed(3)
    assert [batch[1].tolist() for _, batch, _ in read_of(make())] == expected
    assert torch.equal(torch.rand(1), after)


def test_a_limit_leaves_the_indices_of_the_next_reading_right():
    data = EvaluationData.of(loader(8, 2, num_workers=1, persistent_workers=True), 2, "validate", ranks=DataRanks())
    for _ in range(3):
        assert [each.indices for each in data.batches(0, 9, 0)] == [[0, 1], [2, 3]]
