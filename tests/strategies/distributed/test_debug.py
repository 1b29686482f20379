"""The debug mode on real ranks: each mismatch is an error with a table on every waiting rank, not a hang."""

import os
import re
from dataclasses import replace
from datetime import timedelta

import pytest
import torch

from echelon.common.errors import CollectiveError
from echelon.strategies import DDPStrategy
from echelon.strategies.cluster.launchers import detect_environment
from echelon.strategies.distributed.collectives import Collectives
from echelon.strategies.distributed.process_group import ProcessGroup
from echelon.testing import run_ranks

CPU = torch.device("cpu")


def checked_collectives(seconds):
    group = ProcessGroup(detect_environment(), CPU, check_collectives=True, timeout=timedelta(seconds=seconds))
    group.join()
    return group, Collectives(group, CPU)


def call_everything():
    """Return the number of keys in the store after each round of calls that agree."""
    group, ranks = checked_collectives(20)
    other = 1 - ranks.rank
    counts = []
    for _ in range(3):
        mine = torch.ones(4, requires_grad=True)
        ranks.all_reduce({"a": mine, "b": 3})
        (ranks.all_gather(mine).sum() + ranks.reduce_scatter(mine).sum() + ranks.broadcast(mine).sum()).backward()
        if ranks.rank == 0:  # who gives and who takes may do so on different lines, and takers need no data
            ranks.broadcast([mine, "text"])
            ranks.scatter([1, 2])
        else:
            ranks.broadcast(None)
            ranks.scatter(None)
        ranks.gather(torch.ones(ranks.rank))
        ranks.all_gather_object(ranks.rank)
        receiving = ranks.irecv(other)
        sending = [ranks.isend(number, other) for number in range(2)]
        assert [receiving.wait(), ranks.recv(other)] == [0, 1]
        for transfer in reversed(sending):
            transfer.wait()
        ranks.barrier()
        group.cpu_group.barrier().wait()  # a rank deletes keys after it has passed: this one waits for that
        counts.append(group.store.num_keys())
        group.cpu_group.barrier().wait()
    return counts


def test_calls_that_agree_run_and_leave_nothing_in_the_store():
    for counts in run_ranks(call_everything, 2):
        assert len(set(counts)) == 1, counts


def disagree():
    """Return the error of each disagreement, in a group that stays usable all the time."""
    _, ranks = checked_collectives(20)
    rank = ranks.rank
    odd, errors = rank == 1, []

    def failing(call):
        with pytest.raises(CollectiveError) as caught:
            call()
        errors.append(str(caught.value))

    failing(lambda: ranks.all_reduce(torch.ones(3 if odd else 2)))
    failing(lambda: ranks.all_reduce({"x": torch.ones(2), "y": torch.ones(1, dtype=torch.float64 if odd else None)}))
    failing(lambda: ranks.all_gather({"x": 1, "z" if odd else "y": 2}))
    failing(lambda: ranks.all_reduce(1.5, "mean" if odd else "sum"))
    failing(lambda: ranks.broadcast(1, src=int(odd)))
    failing(lambda: ranks.all_gather(1) if odd else ranks.barrier())
    if odd:
        failing(lambda: ranks.all_reduce(1))
    else:
        failing(lambda: ranks.all_reduce(1))
    failing(lambda: ranks.all_reduce(torch.ones(2, requires_grad=odd)))
    assert ranks.all_reduce(1) == ranks.world_size
    return errors


def test_a_disagreement_is_an_error_with_a_table_on_every_rank():
    errors = run_ranks(disagree, 3)
    assert errors[0] == errors[1] == errors[2]
    shapes, types, keys, op, src, order, place, gradient = errors[0]
    assert "Collective 1 cannot run: the ranks differ in structure, shapes or types" in shapes
    lines = shapes.splitlines()
    assert [cell.strip() for cell in lines[1].split("|")] == ["rank", "call", "shapes", "where"]
    rows = [[cell.strip() for cell in line.split("|")] for line in lines[2:5]]
    assert [row[:3] for row in rows] == [
        [str(rank), "all_reduce(sum)", f"float32[{3 if rank == 1 else 2}]"] for rank in range(3)
    ]
    assert all(os.path.basename(__file__) in row[3] for row in rows)
    assert "float64[1]" in types and "['z'] int" in keys and "['y'] int" in keys
    assert "differ in the operation" in op and "all_reduce(mean)" in op
    assert "broadcast(src=0)" in src and "broadcast(src=1)" in src
    assert "all_gather" in order and "barrier" in order
    assert "differ in the line that calls" in place
    assert "float32[2] +grad" in gradient


def disagree_through_the_strategy():
    strategy = DDPStrategy()
    _, ranks = checked_collectives(20)
    strategy.ranks = replace(strategy.ranks, data=ranks)
    with pytest.raises(CollectiveError) as caught:
        strategy.all_reduce(torch.ones(1 + strategy.ranks.data.rank))
    return str(caught.value)


def test_the_line_that_calls_the_strategy_is_shown():
    for error in run_ranks(disagree_through_the_strategy, 2):
        assert error.count(os.path.basename(__file__)) == 2 and "strategy.py" not in error


def stay_away():
    """Return each rank's error where rank 1 leaves out a call, and all other ranks wait for it."""
    _, ranks = checked_collectives(2)
    ranks.all_reduce(torch.ones(2))
    if ranks.rank == 1:
        with pytest.raises(CollectiveError) as caught:
            ranks.recv(0)
    else:
        with pytest.raises(CollectiveError) as caught:
            ranks.all_gather(torch.ones(3))
    return str(caught.value)


def test_who_does_not_come_is_shown_with_its_last_call():
    first, second, third = run_ranks(stay_away, 3)
    for error in (first, third):
        assert re.search(r"Collective 2 cannot run: rank (\d, )*1(, \d)* did not arrive within 2 s\.", error)
        assert re.search(r"1    \| \(not here; last: (recv\(src=0, dst=1\)|all_reduce\(sum\))\)", error)
        assert "all_gather" in error and "float32[3]" in error
    assert "rank 0 did not arrive within 2 s" in second and "1    | recv(src=0, dst=1)" in second


def come_late():
    """Rank 1 comes after rank 0 has given up: it gets the same error, and does not enter a collective alone."""
    group, ranks = checked_collectives(0.5)
    if ranks.rank == 0:
        with pytest.raises(CollectiveError) as caught:
            ranks.all_reduce(1)
        group.store.set("gave up", "")
    else:
        group.store.wait(["gave up"], timedelta(seconds=20))
        with pytest.raises(CollectiveError) as caught:
            ranks.all_reduce(1)
    return str(caught.value)


def test_a_rank_that_comes_too_late_gets_the_error_of_the_others():
    first, second = run_ranks(come_late, 2)
    assert first == second
    assert "rank 1 did not arrive within 0.5 s" in first and "(not here; no call yet)" in first


def skip_a_backward():
    _, ranks = checked_collectives(20)
    total = ranks.all_reduce(torch.ones(2, requires_grad=True)).sum()
    call = total.backward if ranks.rank == 0 else ranks.barrier
    with pytest.raises(CollectiveError) as caught:
        call()
    return str(caught.value)


def test_a_backward_is_checked_as_well():
    for error in run_ranks(skip_a_backward, 2):
        assert "backward of all_reduce" in error and "barrier" in error and os.path.basename(__file__) in error
