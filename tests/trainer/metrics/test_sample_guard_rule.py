"""The tallies of ranks that point to a fault of the run, and those that do not."""

import itertools

import pytest

from echelon.trainer.metrics.sample_guard import SampleDifference, Tally, find_fault


def rank(data_rank, *updates, size=2, stray=0, silent=0):
    """The tally of a rank with this number of updates in each micro-batch."""
    num, fewest = len(updates) + silent, min(updates, default=float("inf"))
    seen = size * sum(updates)
    return Tally(data_rank, num, size * num, seen, fewest, updates.count(fewest), silent, stray)


@pytest.mark.parametrize(
    ("tallies", "found"),
    [
        ([rank(0, 1, 1, 1), rank(1, 1, 1)], None),
        ([rank(0, 1, 1, 1), rank(1, 1, 2)], (12, 10, 1)),
        ([rank(0, 1, 1, 1), rank(1, stray=1)], (8, 6, 1)),
        ([rank(0, 1, 1, 1), rank(1, 1, 1, silent=1)], (10, 12, 1)),
        ([rank(0, 1, 1, 1), rank(0, 1, 1, 2)], None),  # they share samples, and the first counts
        ([rank(0, 2, 2), rank(1, 2, 2)], None),
        ([rank(0, 2, 2), rank(1, 2, 3)], (18, 16, 2)),
        ([rank(0, 0, 1, 1, 2)], None),
        ([rank(0, 1, 1, 1, silent=1)], None),  # one process loses no batch
        ([rank(0, 1, 1, 1), Tally(1, float("nan"))], None),
        ([rank(0, 1, 1, 1), Tally(1)], None),  # it has not logged the metric
        ([rank(0, 1, 2)], None),  # none of them is what is usual
        ([rank(0, *itertools.repeat(1, 40), 2, 2, 2)], (92, 86, 1)),
        ([rank(0, *itertools.repeat(1, 40), *itertools.repeat(2, 10))], None),
        ([], None),
    ],
)
def test_a_fault_is_what_few_batches_have_and_no_module_does(tallies, found):
    assert find_fault(tallies) == (found and SampleDifference(*found))
