"""What ranks and workers read of an epoch that stops after some steps and goes on, maybe on others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from in_step import on_ranks
from torch.utils.data import DataLoader

from echelon.trainer.data.index_stream import DataRanks
from echelon.trainer.data.stream import Cut
from echelon.trainer.data.train_data import TrainData

Layout = tuple[int, int]
"""A number of data ranks, and of workers of each."""


def train_data(loader: DataLoader[Any], ranks: DataRanks) -> TrainData:
    """Return a loader as a rank of a run reads it."""
    return TrainData(loader, seed=7, cut=Cut(1, None, ranks), limit=1.0, in_order=False)


def as_list(batch: Any) -> list[Any]:
    """Return the samples of a batch that is a tensor."""
    found: list[Any] = batch.tolist()
    return found


def steps_of(
    data: TrainData, done: int, stop: int | None = None, samples_of: Callable[[Any], list[Any]] = as_list
) -> tuple[list[list[Any]], int]:
    """Return this rank's samples in each step from a position on, and the position after them."""
    steps = []
    for window in itertools.islice(data.windows(done), stop):
        steps.append([sample for micro_batch in window for sample in samples_of(micro_batch.batch)])
        done += window.length
    return steps, done


def read(
    make: Callable[[int], DataLoader[Any]],
    before: Layout,
    after: Layout | None = None,
    stop: int | None = None,
    *,
    epoch: int = 0,
    samples_of: Callable[[Any], list[Any]] = as_list,
) -> list[Any]:
    """Return the samples of an epoch in order, that may stop after some steps and go on on another layout.

    Args:
        make: makes the loader, given the number of its workers.
        before: the layout that begins.
        after: the layout that goes on; None to read without a stop.
        stop: the steps that the first one reads.
        epoch: which one.
        samples_of: returns the samples of a batch.
    """

    def begin(ranks: DataRanks) -> tuple[list[list[Any]], Any, int]:
        data = train_data(make(before[1]), ranks)
        data.begin_epoch(epoch)
        steps, done = steps_of(data, 0, stop, samples_of)
        return steps, data.state_dict(), done

    first = on_ranks(before[0], begin, DataRanks())
    by_step: list[Any] = list(zip(*(steps for steps, _, _ in first), strict=True))
    if after is not None:
        states = [state for _, state, _ in first]

        def go_on(ranks: DataRanks) -> list[list[Any]]:
            data = train_data(make(after[1]), ranks)
            own = states[ranks.data_rank if before[0] == after[0] else 0]
            done = data.resume_epoch(epoch, own, first[0][2], states)
            return steps_of(data, done, None, samples_of)[0]

        by_step += itertools.zip_longest(*on_ranks(after[0], go_on, DataRanks()), fillvalue=[])
    return list(itertools.chain(*itertools.chain(*by_step)))
