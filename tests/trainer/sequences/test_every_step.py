"""A run that is stopped after any step of two epochs reads what an undisturbed one reads, in order, on any layout."""

import itertools

import pytest
from in_step import on_ranks
from stop_everywhere import IN_SHARDS, KINDS, NUM_EPOCHS, sweep
from sweep import IS_SWEEP, dealt

from echelon.trainer.data.index_stream import DataRanks
from echelon.trainer.data.stream import Cut
from echelon.trainer.data.train_data import TrainData

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.* is dealt batch by batch", "ignore:DataLoader cannot skip to a position"),
]


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
        data = TrainData(KINDS[kind](workers), seed=7, cut=Cut(1, None, ranks), limit=1.0, in_order=False)
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


WHOLE = [kind for kind in KINDS if kind not in IN_SHARDS]
"""Kinds whose order is the same on any layout."""
NUM_RANKS = (3, 2, 1)


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "num_ranks"), dealt(WHOLE, NUM_RANKS, [1]))
def test_a_run_goes_on_after_every_step(kind, num_ranks):
    expected, _ = read(kind, num_ranks, 0)
    alone, _ = read(kind, 1, 0)
    assert in_order(expected) == in_order(alone)
    middle = len(expected) // NUM_EPOCHS
    for stop in range(1, len(expected)) if IS_SWEEP else (middle, middle + 1):
        begun, states = read(kind, num_ranks, 0, stop)
        assert begun == expected[:stop]
        rest, _ = read(kind, num_ranks, 0, states=states)
        assert begun + rest == expected
        others, _ = read(kind, num_ranks % 3 + 1, 0, states=states)
        assert in_order(begun + others) == in_order(alone)


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "num_ranks"), dealt(WHOLE, NUM_RANKS, [0]))
def test_a_run_with_workers_goes_on_after_a_step(kind, num_ranks):
    # each reading starts two processes for each rank and epoch: one stop, another for each number of ranks
    expected, _ = read(kind, num_ranks, 0)
    alone, _ = read(kind, 1, 0)
    assert in_order(expected) == in_order(alone)
    stop = len(expected) // num_ranks - 1
    begun, states = read(kind, num_ranks, 2, stop)
    assert begun == expected[:stop]
    rest, _ = read(kind, num_ranks, 2, states=states)
    assert begun + rest == expected


@pytest.mark.parametrize(
    ("num_ranks", "others", "cases"),
    [
        (2, (1,), [("packed", 0), ("token_batches", 0), ("mixture_of_shards", 0), ("shards", 0)]),
        pytest.param(2, (), [("mixture_of_shards", 2)], marks=pytest.mark.only_in_sweep),
    ],
    ids=["in the process", "in workers"],
)
def test_a_run_of_real_ranks_goes_on_after_a_step(num_ranks, others, cases, tmp_path):
    # every step, and all kinds and numbers: make sweep
    assert sweep(cases, num_ranks, others, tmp_path, every=5, timeout=240) >= 2 * len(cases)
