"""Collectives over some of the ranks: their numbers, their gradients, and what they refuse."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from echelon.common.errors import CollectiveError, ConfigError
from echelon.strategies.cluster.launchers import detect_environment
from echelon.strategies.distributed.collectives import Collectives
from echelon.strategies.distributed.process_group import ProcessGroup
from echelon.testing import run_ranks

CPU = torch.device("cpu")


def joined(**settings):
    group = ProcessGroup(detect_environment(), CPU, **settings)
    group.join()
    return Collectives(group, CPU)


def own_part(rank):
    """Ranks 0 and 2, and ranks 1 and 3: numbers there that differ from those among all."""
    return [rank % 2, rank % 2 + 2]


def talk_in_parts(**settings):
    everyone = joined(**settings)
    me = everyone.rank
    part = everyone.over(own_part(me))
    first, second = own_part(me)
    assert (part.rank, part.world_size) == (me // 2, 2)
    mine = torch.full((2,), float(me), dtype=torch.float64, requires_grad=True)
    assert part.all_reduce(mine).tolist() == [float(first + second)] * 2
    assert part.all_reduce({"n": me}, "max") == {"n": second}
    assert part.all_gather(mine)[:, 0].tolist() == [first, second]
    assert part.reduce_scatter(mine).tolist() == [float(first + second)]
    assert part.all_gather_object(me) == [first, second]
    assert part.on_first_rank(lambda: me) == first
    for src in range(2):
        assert part.broadcast(me if part.rank == src else None, src) == [first, second][src]
        assert part.scatter([[me, 0], [me, 1]] if part.rank == src else None, src) == [[first, second][src], part.rank]
        assert part.gather(me, src) == ([first, second] if part.rank == src else None)
    part.broadcast(mine * (me + 1), src=1).sum().backward()
    if part.rank == 1:  # two ranks have the value
        assert mine.grad.tolist() == [2.0 * (me + 1)] * 2
    other = 1 - part.rank
    received = part.irecv(other)
    part.send(torch.tensor([me]), other)
    assert received.wait().tolist() == [[first, second][other]]
    part.barrier()
    assert dist.get_process_group_ranks(part.device_group) == [first, second]


@pytest.mark.parametrize("settings", [{}, {"check_collectives": True, "timeout": timedelta(seconds=20)}])
def test_the_ranks_of_a_part_talk_among_themselves(settings):
    run_ranks(talk_with, 4, settings)


def talk_with(settings):
    talk_in_parts(**settings)


def make_special_parts():
    everyone = joined()
    assert everyone.over([0, 1]) is everyone
    alone = everyone.over([everyone.rank])
    assert everyone.over([everyone.rank]).device_group is alone.device_group  # in another run of this process
    data = {"x": torch.ones(2), "n": 3}
    assert alone.all_reduce(data) is data and alone.all_gather_object(data) == [data]
    assert (alone.rank, alone.world_size, alone.over([0])) == (0, 1, alone)
    assert dist.get_process_group_ranks(alone.device_group) == [everyone.rank]
    with pytest.raises(
        ConfigError,
        match=r"a set of ranks that includes the calling one, the same on each of them, got \(0,\) on rank 1",
    ):
        everyone.over([0])
    with pytest.raises(ConfigError, match=r"got \(0, 1\) on rank 0 of \[\(0, 1\), \(1,\)\]"):
        everyone.over([0, 1] if everyone.rank == 0 else [1])


def test_all_ranks_are_the_same_object_and_one_is_the_identity():
    run_ranks(make_special_parts, 2)


def test_without_a_group_every_part_is_the_identity_itself():
    one = Collectives(None, CPU)
    assert one.over([0]) is one and one.device_group is None


def disagree_in_a_part():
    everyone = joined(check_collectives=True, timeout=timedelta(seconds=20))
    part = everyone.over(own_part(everyone.rank))
    if everyone.rank == 2:
        with pytest.raises(CollectiveError, match=r"(?s)differ in the operation.*\n0 +\| all_reduce.*\n2 +\| barrier"):
            part.barrier()
    elif everyone.rank == 0:
        with pytest.raises(CollectiveError, match=r"differ in the operation"):
            part.all_reduce(1)
    else:
        part.barrier()


def test_the_table_of_a_disagreement_names_ranks_by_their_numbers_among_all():
    run_ranks(disagree_in_a_part, 4)
