"""Several ranks together read what one process reads: every sample once, in the same global batches."""

import itertools
import math
import random
from dataclasses import dataclass

import pytest
import torch
from in_step import on_ranks
from small import Noted, flat, loader, raises, samples
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from echelon import CombinedLoader, ConfigError, DataError
from echelon.trainer.data.index_stream import DataRanks
from echelon.trainer.data.stream import Cut
from echelon.trainer.data.train_data import TrainData


@dataclass
class Step:
    """One window on one rank, and where the rank was after it."""

    samples: list[int]
    sizes: list[int]
    total: int
    length: int
    state: object


@dataclass
class Epoch:
    """What a rank read of an epoch."""

    steps: list[Step]
    num_batches: float
    data: TrainData


def train_data(source, ranks, *, accumulate=1, global_batch_size=None, limit=1.0, in_order=False, seed=7):
    cut = Cut(accumulate, global_batch_size, ranks)
    return TrainData(source, seed=seed, cut=cut, limit=limit, in_order=in_order)


def read(data, windows, plain=flat):
    steps = []
    for window in windows:
        sizes = [micro_batch.size for micro_batch in window]
        batches = [micro_batch.batch for micro_batch in window]
        total = window.total_size or sum(sizes)
        steps.append(Step(plain(batches), sizes, total, window.length, data.state_dict()))
    return steps


def epoch(make, data_size, *, number=0, planned_size=0, is_dealing=True, plain=flat, **settings):
    """Read an epoch on this many ranks."""

    def run(ranks):
        data = train_data(make(ranks), ranks, **settings)
        data.begin_epoch(number)
        return Epoch(read(data, data.windows(0), plain), data.num_batches, data)

    return on_ranks(data_size, run, DataRanks(planned_size=planned_size, is_dealing=is_dealing))


def global_batches(ranks):
    """The samples of each step, over all ranks; everything that affects decisions is checked to be equal on all."""
    assert len({len(rank.steps) for rank in ranks}) == len({rank.num_batches for rank in ranks}) == 1
    together = []
    for parts in zip(*(rank.steps for rank in ranks), strict=True):
        assert {part.total for part in parts} == {sum(sum(part.sizes) for part in parts)}
        assert {part.length for part in parts} == {max(len(part.sizes) for part in parts)}
        together.append([sample for part in parts for sample in part.samples])
    if math.isfinite(ranks[0].num_batches):
        assert sum(step.length for step in ranks[0].steps) == ranks[0].num_batches
    return together


class Unsized:
    """A sampler without a length that draws from the global generators."""

    def __init__(self, entries):
        self.entries = entries

    def __iter__(self):
        return iter(random.sample(self.entries, len(self.entries)))


class Batches:
    """A sequence of batches."""

    def __init__(self, num_batches=5):
        self.num_batches = num_batches
        self.reads = []

    def __len__(self):
        return self.num_batches

    def __getitem__(self, index):
        if index >= self.num_batches:
            raise IndexError(index)
        self.reads.append(index)
        return [torch.full((2, 2), 0.1), torch.tensor([[0.2 * index], [0.2 * index + 0.1]])]


LISTS = [[0, 1], [5, 2, 3], [4], [6, 7], [8, 9, 10]]

KINDS = {
    "in order": lambda: loader(23, 2),
    "shuffled": lambda: loader(23, 2, shuffle=True),
    "even": lambda: loader(24, 2, shuffle=True),
    "drop_last": lambda: loader(23, 2, shuffle=True, drop_last=True),
    "own generator": lambda: loader(23, 2, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "workers": lambda: loader(13, 2, shuffle=True, num_workers=1),
    "sampler": lambda: loader(23, 2, sampler=list(range(22, 2, -1))),
    "replacement": lambda: loader(23, 2, sampler=RandomSampler(range(23), replacement=True, num_samples=31)),
    "weighted": lambda: loader(23, 2, sampler=WeightedRandomSampler(torch.arange(23.0), 19)),
    "subset": lambda: loader(23, 2, sampler=SubsetRandomSampler(range(3, 20))),
    "unsized sampler": lambda: loader(23, 2, sampler=Unsized(list(range(17)))),
    "batch sampler": lambda: DataLoader(samples(23), batch_sampler=BatchSampler(RandomSampler(range(23)), 2, False)),
    "lists": lambda: DataLoader(samples(23), batch_sampler=LISTS),
    "unsized batch sampler": lambda: DataLoader(samples(23), batch_sampler=Unsized(LISTS)),
    "sampler of lists": lambda: DataLoader(samples(23), batch_size=None, sampler=LISTS),
    "ready-made": lambda: DataLoader(Batches(), batch_size=None, shuffle=True),
    "sequence": Batches,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("data_size", [2, 3])
def test_ranks_together_read_the_global_batches_of_one_process(kind, data_size):
    for accumulate, number in [(1, 0), (2, 1)]:
        one, ranks = (
            epoch(lambda _: KINDS[kind](), size, planned_size=data_size, accumulate=accumulate, number=number)
            for size in (1, data_size)
        )
        assert global_batches(ranks) == global_batches(one) != []


def test_a_rank_without_samples_goes_through_the_step():
    ranks = epoch(lambda _: loader(1, 2), 3)
    assert global_batches(ranks) == [[0]]
    assert [rank.steps[0].samples for rank in ranks] == [[0], [], []]
    assert {rank.steps[0].state[0]["position"] for rank in ranks} == {1}


def test_ranks_may_have_different_numbers_of_micro_batches():
    ranks = epoch(lambda _: loader(50, 8), 3, global_batch_size=25)
    assert global_batches(ranks) == [list(range(25)), list(range(25, 50))]
    assert [rank.steps[0].sizes for rank in ranks] == [[8, 1], [8], [8]]
    assert {rank.num_batches for rank in ranks} == {4}
    assert {rank.data.num_steps for rank in ranks} == {2}


def test_every_rank_is_at_the_same_position_after_every_step():
    ranks = epoch(lambda _: loader(19, 2, shuffle=True), 3, accumulate=2)
    for states in zip(*([step.state for step in rank.steps] for rank in ranks), strict=True):
        assert all(state == states[0] for state in states)
    assert [step.state[0]["position"] for step in ranks[0].steps] == [12, 19]


@pytest.mark.parametrize("limit", [1, 3, 0.5])
@pytest.mark.parametrize("make", [lambda _: loader(40, 2), lambda _: DataLoader(samples(40), batch_sampler=LISTS * 3)])
def test_a_limit_counts_the_batches_of_the_rank_that_has_most(make, limit):
    ranks = epoch(make, 2, accumulate=2, limit=limit)
    assert sum(step.length for step in ranks[0].steps) == ranks[0].num_batches
    global_batches(ranks)


def test_a_limit_reads_no_sample_more():
    data = Noted(40)
    epoch(lambda _: DataLoader(data, 2), 2, limit=2)
    assert sorted(data.reads) == list(range(8))


def test_overfitting_reads_the_same_first_batches_in_order():
    ranks = epoch(lambda _: loader(40, 2, shuffle=True), 3, limit=2, in_order=True, number=4)
    assert global_batches(ranks) == [list(range(6)), list(range(6, 12))]


def test_a_global_batch_of_fewer_samples_than_ranks_is_refused():
    with raises(ConfigError, "global_batch_size=2 is less", "3 ranks", "give at least 3"):
        train_data(loader(), DataRanks(0, 3), global_batch_size=2)


# --- another number of ranks goes on


def finished_by(make, states, batches_done, data_size, planned_size):
    """Read the rest of an epoch whose beginning a run on other ranks has read."""

    def run(ranks):
        data = train_data(make(), ranks)
        done = data.resume_epoch(1, states, batches_done)
        steps = read(data, data.windows(done))
        assert done + sum(step.length for step in steps) == data.num_batches
        return Epoch(steps, math.inf, data)

    return on_ranks(data_size, run, DataRanks(planned_size=planned_size))


@pytest.mark.filterwarnings("ignore:Batches cannot skip to a position")
@pytest.mark.parametrize("data_size", [1, 2, 3, 4])
@pytest.mark.parametrize("make", [KINDS["shuffled"], KINDS["batch sampler"], KINDS["sequence"]])
def test_other_ranks_go_on_with_the_same_global_batches(make, data_size):
    begun = epoch(lambda _: make(), 2, number=1)
    expected = global_batches(begun)
    assert len(expected) >= 3
    for stop in range(1, len(expected)):
        done = sum(step.length for step in begun[0].steps[:stop])
        rest = finished_by(make, begun[0].steps[stop - 1].state, done, data_size, planned_size=2)
        assert global_batches(rest) == expected[stop:]
        assert {rank.data.global_batch_size for rank in rest} == {begun[0].data.global_batch_size}


@pytest.mark.parametrize(("before", "after"), [((2, 6), (6, 2)), ((6, 2), (2, 6)), ((2, 1), (24, 1)), ((5, 1), (4, 1))])
def test_batches_cut_in_another_way_lose_nothing(before, after):
    def data_of(batch_size, accumulate):
        return train_data(loader(24, batch_size), DataRanks(), accumulate=accumulate)

    first, second = data_of(*before), data_of(*after)
    first.begin_epoch(0)
    begun = read(first, itertools.islice(first.windows(0), 1))
    done = second.resume_epoch(0, begun[0].state, len(begun[0].sizes))
    if done == 0:
        second.begin_epoch(0)  # as the loop does
    rest = read(second, second.windows(done))
    assert [sample for step in begun + rest for sample in step.samples] == list(range(24))


# --- data that deals itself


class Stream(IterableDataset):
    """The samples of one rank, which only this rank knows."""

    def __init__(self, first, num_samples):
        self.first, self.num_samples = first, num_samples

    def __iter__(self):
        return iter([samples(40)[self.first + index] for index in range(self.num_samples)])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_streams_of_different_length_finish_on_all_ranks(accumulate):
    ranks = epoch(
        lambda ranks: DataLoader(Stream(10 * ranks.data_rank, (9, 1, 0)[ranks.data_rank]), 2), 3, accumulate=accumulate
    )
    together = global_batches(ranks)
    assert sorted(itertools.chain(*together)) == [*range(9), 10]
    assert [step.total for step in ranks[2].steps] == ([3, 2, 2, 2, 1] if accumulate == 1 else [5, 4, 1])


class Sized:
    def __init__(self, num_batches):
        self.num_batches = num_batches

    def __iter__(self):
        return iter(loader(2 * self.num_batches, 2))

    def __len__(self):
        return self.num_batches


@pytest.mark.parametrize(("limit", "expected"), [(1.0, 4), (3, 3), (0.5, 2)])
def test_the_longest_rank_says_how_many_batches_there_are(limit, expected):
    ranks = epoch(lambda ranks: Sized((2, 4)[ranks.data_rank]), 2, limit=limit)
    assert {rank.num_batches for rank in ranks} == {expected}
    assert [step.length for step in ranks[0].steps] == [1] * expected
    global_batches(ranks)


@pytest.mark.parametrize("in_batch_sampler", [False, True])
def test_a_distributed_sampler_of_the_users_is_respected(in_batch_sampler):
    def make(ranks):
        sampler = DistributedSampler(samples(12), ranks.data_size, ranks.data_rank, seed=3)
        if in_batch_sampler:
            return DataLoader(samples(12), batch_sampler=BatchSampler(sampler, 2, False))
        return loader(12, 2, sampler=sampler)

    ranks = epoch(make, 3, number=2)
    for data_rank, rank in enumerate(ranks):
        mine = DistributedSampler(samples(12), 3, data_rank, seed=3)
        mine.set_epoch(2)
        assert [sample for step in rank.steps for sample in step.samples] == list(mine)
    assert sorted(itertools.chain(*global_batches(ranks))) == list(range(12))
    assert ranks[0].data.global_batch_size == (None if in_batch_sampler else 6)


def test_a_distributed_sampler_for_other_ranks_is_refused():
    data = loader(12, 2, sampler=DistributedSampler(samples(12), 2, 0))
    with raises(
        DataError, "must divide the data among 2 data ranks", "num_replicas=2 and rank=0 on data rank 1", "data_rank"
    ):
        train_data(data, DataRanks(1, 2))


def test_nothing_is_dealt_where_the_user_does():
    ranks = epoch(lambda ranks: loader(12, 2, sampler=range(ranks.data_rank, 11, 2)), 2, is_dealing=False)
    assert [step.samples for step in ranks[1].steps] == [[1, 3], [5, 7], [9]]
    assert sorted(itertools.chain(*global_batches(ranks))) == list(range(11))


def test_a_rank_goes_on_with_a_stream_of_its_own_and_other_ranks_as_near_as_can_be():
    def run(ranks):
        data = train_data(DataLoader(Stream(10 * ranks.data_rank, 8), 2), ranks)
        data.begin_epoch(0)
        begun = read(data, itertools.islice(data.windows(0), 2))
        again = train_data(DataLoader(Stream(10 * ranks.data_rank, 8), 2), ranks)
        rest = read(again, again.windows(again.resume_epoch(0, begun[1].state, 2)))
        return [step.samples for step in begun + rest], begun[1].state

    with pytest.warns(UserWarning, match="cannot skip to a position"):  # around the threads, which share what is caught
        (first, states), (second, _) = on_ranks(2, run)
    assert first == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert second == [[10, 11], [12, 13], [14, 15], [16, 17]]
    alone = train_data(DataLoader(Stream(0, 20), 2), DataRanks())
    with pytest.warns(UserWarning, match="saved by 2 ranks and is resumed by 1, each from position 8"):
        assert alone.resume_epoch(0, states, 2) == 4


def test_a_loader_that_began_again_inside_a_step_goes_on_and_in_other_steps_as_near_as_can_be():
    def both(accumulate=4):
        return train_data([loader(24, 1), loader(5, 1)], DataRanks(), accumulate=accumulate)

    def rows_of(data, windows):
        return read(data, windows, lambda rows: [flat(row) for row in rows])

    data = both()
    data.begin_epoch(0)
    whole = [step.samples for step in rows_of(data, data.windows(0))]
    assert [sample for [_, sample] in whole[0] + whole[1]][:7] == [0, 1, 2, 3, 4, 0, 1]
    for number in range(1, 6):
        data.begin_epoch(0)
        begun = rows_of(data, itertools.islice(data.windows(0), number))
        again = both()
        rest = rows_of(again, again.windows(again.resume_epoch(0, begun[-1].state, 4 * number)))
        assert [step.samples for step in begun + rest] == whole
    data.begin_epoch(0)
    [*_, second] = rows_of(data, itertools.islice(data.windows(0), 2))
    other = both(2)
    other.resume_epoch(0, second.state, 8)
    with pytest.warns(UserWarning, match="had begun, and its batches are dealt differently now: 3 of them"):
        next(other.windows(8))


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size", "sequential"])
def test_several_loaders_are_dealt_together(mode):
    def seen(batches):
        return flat(batches if mode == "sequential" else [part for batch in batches for part in batch if part])

    def make(_):
        return CombinedLoader([loader(13, 2), loader(25, 1, sampler=range(20, 25))], mode)

    together = sorted(itertools.chain(*global_batches(epoch(make, 2, plain=seen))))
    everything = [*range(13), *range(20, 25)]
    if mode == "min_size":
        assert together == [*range(10), *range(20, 25)]  # rank 0 has three rows, rank 1 two
    elif mode == "max_size_cycle":
        assert sorted(set(together)) == everything
    else:
        assert together == everything


# --- random augmentation


class Augmented(Dataset):
    def __len__(self):
        return 19

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), torch.rand(()).item()], dtype=torch.float64)


def test_augmentation_of_a_sample_is_the_same_on_any_number_of_ranks():
    def augmented(data_size, **options):
        ranks = epoch(
            lambda _: DataLoader(Augmented(), 2, shuffle=True, **options),
            data_size,
            planned_size=2,
            plain=lambda batches: torch.cat(batches).tolist() if batches else [],
        )
        return global_batches(ranks)

    one = augmented(1)
    assert len({sample[1] for sample in itertools.chain(*one)}) == 19
    assert augmented(2) == augmented(3) == augmented(2, num_workers=1) == one


def test_what_each_rank_reads_of_its_own_is_augmented_apart():
    def make(ranks):
        return DataLoader(Augmented(), 2, sampler=DistributedSampler(range(19), ranks.data_size, ranks.data_rank))

    ranks = epoch(make, 2, plain=lambda batches: torch.cat(batches).tolist())
    assert len({sample[1] for sample in itertools.chain(*global_batches(ranks))}) == 20
