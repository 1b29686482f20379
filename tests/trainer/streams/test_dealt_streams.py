"""Streams are dealt to ranks and workers without a line of the user: no sample is lost or comes twice."""

import itertools
import random
import warnings

import numpy as np
import pytest
import torch
from in_step import on_ranks
from pairwise import covering
from stateful_stream import WithState
from sweep import IS_SWEEP, dealt
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from echelon.trainer.data.evaluation_data import EvaluationData
from echelon.trainer.data.index_stream import DataRanks
from echelon.trainer.data.stream import Cut
from echelon.trainer.data.train_data import TrainData

SIZE, BATCH = 37, 3


class Plain(IterableDataset):
    """Numbers in order."""

    def __iter__(self):
        yield from range(SIZE)


class Shuffled(IterableDataset):
    """Numbers in an order drawn from all global generators."""

    def __iter__(self):
        order = random.sample(range(SIZE), SIZE)
        order = [order[place] for place in np.random.permutation(SIZE)]
        yield from (order[place] for place in torch.randperm(SIZE).tolist())


class Told(IterableDataset):
    """Numbers that tell the epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from range(100 * self.epoch, 100 * self.epoch + SIZE)


class ByWorker(IterableDataset):
    """Numbers that are divided among workers, but not ranks."""

    def __iter__(self):
        info = get_worker_info()
        yield from range(0 if info is None else info.id, SIZE, 1 if info is None else info.num_workers)


class ByRank(IterableDataset):
    """Numbers that are divided among ranks, but not workers."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def __iter__(self):
        yield from range(self.rank, SIZE, self.size)


class Stateful(WithState, Plain):
    """Numbers in order; it knows where it is, and counts what it reads."""


class Shards(IterableDataset):
    """Numbers in shards of different lengths, as Hugging Face's streams have them."""

    def __init__(self, parts):
        self.parts = parts

    @classmethod
    def cut(cls, num_shards):
        return cls([list(range(start, SIZE, num_shards)) for start in range(num_shards)])

    @property
    def num_shards(self):
        return len(self.parts)

    def shard(self, num_shards, index):
        return type(self)(self.parts[index::num_shards])

    def __iter__(self):
        return itertools.chain(*self.parts)


class StatefulShards(Shards):
    """Shards with a state."""

    position = 0

    def __iter__(self):
        start, self.position = self.position, 0
        for place, number in enumerate(itertools.islice(itertools.chain(*self.parts), start, None), start + 1):
            self.position = place
            yield number

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def loader_of(dataset, workers=0, **options):
    return DataLoader(dataset, BATCH, num_workers=workers, **options)


def data_of(dataset, ranks, workers=0, accumulate=1, **options):
    loader = loader_of(dataset, workers, **options)
    return TrainData(loader, seed=7, cut=Cut(accumulate, None, ranks), limit=1.0, in_order=False)


def steps_of(data, done=0, stop=None):
    """Return this rank's samples in each step, and how many batches were done."""
    steps = []
    for window in itertools.islice(data.windows(done), stop):
        steps.append([number for micro_batch in window for number in micro_batch.batch.tolist()])
        done += window.length
    return steps, done


def epochs_of(make, num_ranks, workers=0, num_epochs=1, **options):
    """Return the samples of each step over all ranks, epoch by epoch."""

    def run(ranks):
        data, found = data_of(make(ranks), ranks, workers, **options), []
        for epoch in range(num_epochs):
            data.begin_epoch(epoch)
            found.append(steps_of(data)[0])
        data.close()
        return found

    results = on_ranks(num_ranks, run, DataRanks())
    return [
        [list(itertools.chain(*parts)) for parts in zip(*epoch, strict=True)] for epoch in zip(*results, strict=True)
    ]


LAYOUTS = [(1, 1), (1, 2), (2, 0), (2, 2), (3, 0), (3, 1)]


@pytest.mark.filterwarnings("ignore:.* is dealt batch by batch")
@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "layout"), dealt([Shuffled, Plain, Stateful, Told], LAYOUTS, [1]))
def test_each_layout_reads_the_order_of_one_process(kind, layout):
    num_ranks, workers = layout
    alone = epochs_of(lambda _: kind(), 1, num_epochs=2)
    dealt = epochs_of(lambda _: kind(), num_ranks, workers, num_epochs=2)
    for mine, expected in zip(dealt, alone, strict=True):
        order = list(itertools.chain(*expected))
        assert list(itertools.chain(*mine)) == order
        assert len(order) == SIZE and [len(step) for step in mine[:-1]] == [BATCH * num_ranks] * (len(mine) - 1)
    assert kind is not Shuffled or alone[0] != alone[1]


@pytest.mark.filterwarnings("ignore:.* is dealt batch by batch")
@pytest.mark.sweep
@pytest.mark.parametrize(("num_ranks", "workers"), LAYOUTS if IS_SWEEP else [(2, 2)])
def test_what_a_stream_divides_itself_is_not_divided_again(num_ranks, workers):
    def seen(make):
        [epoch] = epochs_of(make, num_ranks, workers)
        return sorted(itertools.chain(*epoch))

    assert seen(lambda _: ByWorker()) == list(range(SIZE))
    assert seen(lambda ranks: ByRank(ranks.data_rank, ranks.data_size)) == list(range(SIZE))


CUT = [(Shards, 3), (StatefulShards, 8), (StatefulShards, 3), (Shards, 8)]


@pytest.mark.sweep
@pytest.mark.parametrize(("cut", "layout"), dealt(CUT, LAYOUTS, [1]))
def test_each_shard_is_read_by_one_reader(cut, layout):
    kind, num_shards = cut
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epochs = epochs_of(lambda _: kind.cut(num_shards), *layout, num_epochs=2)
    assert [sorted(itertools.chain(*epoch)) for epoch in epochs] == [list(range(SIZE))] * 2


@pytest.mark.filterwarnings("ignore:.* is dealt batch by batch")
def test_too_few_shards_for_the_ranks_are_read_batch_by_batch():
    [epoch] = epochs_of(lambda _: Shards.cut(2), 3, 2)
    assert list(itertools.chain(*epoch)) == list(itertools.chain(*Shards.cut(2).parts))


def test_the_cost_of_dealing_is_said_once():
    with pytest.warns(UserWarning, match="each of 4 readers .* reads all of it, and keeps one batch in 4") as said:
        epochs_of(lambda _: Plain(), 2, 2, num_epochs=2)
    assert len(said) == 1  # by rank 0, whatever the number of epochs


def test_persistent_workers_and_worker_init_fn_keep_working():
    with pytest.warns(UserWarning, match="is dealt batch by batch"):
        told = epochs_of(lambda _: Told(), 1, 2, num_epochs=3, persistent_workers=True)
    assert [list(itertools.chain(*epoch)) for epoch in told] == [
        list(range(100 * epoch, 100 * epoch + SIZE)) for epoch in range(3)
    ]
    divided = epochs_of(lambda _: Range(), 1, 2, num_epochs=2, worker_init_fn=divide_range)
    assert [sorted(itertools.chain(*epoch)) for epoch in divided] == [list(range(SIZE))] * 2


class Range(IterableDataset):
    """The example of torch's documentation: a worker_init_fn sets its bounds."""

    def __init__(self):
        self.start, self.end = 0, SIZE

    def __iter__(self):
        return iter(range(self.start, self.end))


def divide_range(worker_id):
    info = get_worker_info()
    dataset, half = info.dataset, SIZE // 2
    dataset.start, dataset.end = (0, half) if worker_id == 0 else (half, SIZE)


def interrupted(make, before, after, stop, epoch=0, **options):
    """Return the samples of an epoch that stops after some steps and goes on, each with (ranks, workers)."""

    def begin(ranks):
        data = data_of(make(), ranks, before[1], **options)
        data.begin_epoch(epoch)
        steps, done = steps_of(data, stop=stop)
        return steps, data.state_dict(), done

    first = on_ranks(before[0], begin, DataRanks())
    states = [state for _, state, _ in first]
    read = [list(itertools.chain(*parts)) for parts in zip(*(steps for steps, _, _ in first), strict=True)]

    def go_on(ranks):
        data = data_of(make(), ranks, after[1], **options)
        own = states[ranks.data_rank if before[0] == after[0] else 0]
        done = data.resume_epoch(epoch, own, first[0][2], states)
        return steps_of(data, done)[0]

    rest = on_ranks(after[0], go_on, DataRanks())
    return read + [list(itertools.chain(*parts)) for parts in itertools.zip_longest(*rest, fillvalue=[])]


STOPS = [1, 2, 4]


def stopped(kinds, layouts, stops):
    """Return kinds with the layouts before and after and the steps between: each two of them meet, in a sweep all."""
    cases = list(itertools.product(kinds, layouts, stops))
    return (
        cases if IS_SWEEP else covering(cases, lambda case: dict(zip(("kind", "layouts", "stop"), case, strict=True)))
    )


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:.* is dealt batch by batch", "ignore:DataLoader cannot skip to a position")
@pytest.mark.parametrize(
    ("kind", "layouts", "stop"),
    stopped(
        [Plain, Shuffled, Stateful],
        [((1, 0), (2, 0)), ((2, 0), (2, 0)), ((2, 2), (3, 0)), ((3, 0), (1, 2)), ((1, 2), (1, 2))],
        STOPS,
    ),
)
def test_a_stream_goes_on_exactly_on_other_ranks_and_workers(kind, layouts, stop):
    [expected] = epochs_of(lambda _: kind(), 1)
    order = list(itertools.chain(*expected))
    assert list(itertools.chain(*interrupted(kind, *layouts, stop))) == order


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:DataLoader cannot skip to a position")
@pytest.mark.parametrize(
    ("case", "stop"),
    dealt([*itertools.product([Shards, StatefulShards], [(1, 0), (1, 2), (2, 0), (2, 2)])], STOPS, [0]),
)
def test_shards_go_on_in_the_same_order(case, stop):
    kind, layout = case
    [expected] = epochs_of(lambda _: kind.cut(7), *layout)
    assert interrupted(lambda: kind.cut(7), layout, layout, stop) == expected


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "layouts", "stop"),
    stopped(
        [Shards, StatefulShards],
        [((1, 0), (2, 0)), ((2, 0), (3, 2)), ((3, 0), (1, 2)), ((2, 2), (2, 0))],
        [1, 3],
    ),
)
def test_shards_go_on_without_loss_on_other_ranks_and_workers(kind, layouts, stop):
    found = interrupted(lambda: kind.cut(7), *layouts, stop)
    assert sorted(itertools.chain(*found)) == list(range(SIZE))


def test_a_stream_with_a_state_is_not_read_again():
    data = data_of(Stateful(), DataRanks())
    data.begin_epoch(0)
    steps_of(data, stop=4)
    again = Stateful()
    resumed = data_of(again, DataRanks())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps, _ = steps_of(resumed, resumed.resume_epoch(0, data.state_dict(), 4))
    assert again.reads == SIZE - 4 * BATCH == sum(map(len, steps))


@pytest.mark.filterwarnings("ignore:.* is dealt batch by batch", "ignore:DataLoader cannot skip to a position")
@pytest.mark.parametrize("kind", [Plain, Stateful])
@pytest.mark.parametrize(("before", "after"), [((1, 0), (1, 0)), ((1, 2), (2, 0))])
def test_nothing_is_left_after_the_last_batch(kind, before, after):
    last = -(-SIZE // BATCH)  # by then the stream is where it began
    assert list(itertools.chain(*interrupted(kind, before, after, last))) == list(range(SIZE))


class Masking:
    """A collate function that draws at random."""

    def __call__(self, samples):
        return torch.tensor([sample + random.randrange(3) * 1000 for sample in samples])


@pytest.mark.filterwarnings("ignore:.* is dealt batch by batch")
def test_what_a_collate_function_draws_does_not_change_what_is_dealt():
    alone = epochs_of(lambda _: Shuffled(), 2, 0, collate_fn=Masking())
    for workers in (1, 2):
        assert epochs_of(lambda _: Shuffled(), 2, workers, collate_fn=Masking()) == alone
    assert sorted(number % 1000 for number in itertools.chain(*alone[0])) == list(range(SIZE))


def evaluated(make, num_ranks, workers, limit=1.0):
    """Return the places and samples of a validation on all ranks, in the order of their places."""

    def run(ranks):
        data = EvaluationData.of(loader_of(make(ranks), workers), limit, "validate", ranks=ranks, seed=3)
        before = random.getstate()
        batches = list(data.batches(0, float("inf"), step=0))
        assert random.getstate() == before
        return [(each.batch_idx, each.batch.tolist()) for each in batches]

    return sorted(itertools.chain(*on_ranks(num_ranks, run, DataRanks())))


@pytest.mark.filterwarnings("ignore:.* is dealt batch by batch")
@pytest.mark.parametrize(("num_ranks", "workers"), [(1, 2), (2, 0), (3, 1)])
def test_an_evaluation_reads_each_sample_of_a_stream_once(num_ranks, workers):
    alone = evaluated(lambda _: Plain(), 1, 0)
    assert evaluated(lambda _: Plain(), num_ranks, workers) == alone
    assert evaluated(lambda _: Plain(), num_ranks, workers, limit=5) == alone[:5]
    assert evaluated(lambda _: Sized(), num_ranks, workers) == alone
    by_shards = evaluated(lambda _: Shards.cut(5), num_ranks, workers)
    assert sorted(number for _, batch in by_shards for number in batch) == list(range(SIZE))


class Sized(Plain):
    """A stream with a length."""

    def __len__(self):
        return SIZE
