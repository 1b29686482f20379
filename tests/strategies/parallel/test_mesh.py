"""Degrees of parallelism: what is inferred, what contradicts the processes, and which ranks lie along an axis."""

import pytest

from echelon import ConfigError
from echelon.strategies.parallel.mesh import Degrees, check_degrees

GIVEN = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1}


@pytest.mark.parametrize(
    ("world_size", "num_nodes", "given", "expected"),
    [
        (4, 1, {"dp_shard": "auto", "tp": 2}, (1, 2, 1, 2)),
        (2, 1, {"dp_shard": "auto", "tp": 2}, (1, 1, 1, 2)),
        (8, 1, {"dp_shard": 2, "cp": 2, "tp": 2}, (1, 2, 2, 2)),
        (8, 2, {"dp_shard": "nodes", "tp": "auto"}, (1, 2, 1, 4)),
        (4, 1, {"dp_shard": "nodes", "tp": "auto"}, (1, 1, 1, 4)),
        (8, 1, {"dp_replicate": "auto", "dp_shard": 2, "tp": 2}, (2, 2, 1, 2)),
        (1, 1, {"dp_shard": "auto"}, (1, 1, 1, 1)),
    ],
)
def test_one_degree_is_what_the_others_leave(world_size, num_nodes, given, expected):
    degrees = Degrees.fit(world_size, num_nodes, GIVEN | given)
    assert (degrees.dp_replicate, degrees.dp_shard, degrees.cp, degrees.tp) == expected
    assert degrees.world_size == world_size


@pytest.mark.parametrize(
    ("world_size", "given", "text"),
    [
        (4, {"dp_shard": 3, "tp": 2}, r"dp_shard \* tp = 6, but world_size is 4; choose degrees whose product is 4\."),
        (4, {"dp_shard": 1, "tp": 2}, r"tp = 2, but world_size is 4; choose degrees whose product is 4"),
        (6, {"dp_shard": "auto", "tp": 4}, r"tp = 4, but world_size is 6; choose degrees whose product divides 6"),
        (2, {}, r"dp_replicate \* dp_shard \* cp \* tp = 1, but world_size is 2"),
    ],
)
def test_degrees_that_do_not_multiply_to_the_processes_are_refused(world_size, given, text):
    with pytest.raises(ConfigError, match=text):
        Degrees.fit(world_size, 1, GIVEN | given)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"tp": 0}, "tp must be >= 1, 'auto' or 'nodes', got 0"),
        ({"cp": True}, "cp must be >= 1, 'auto' or 'nodes', got True"),
        ({"dp_shard": "all"}, "dp_shard must be >= 1, 'auto' or 'nodes', got 'all'"),
        ({"dp_shard": "auto", "tp": "auto"}, "At most one degree can be 'auto', got dp_shard and tp"),
    ],
)
def test_what_is_not_a_degree_is_refused_at_once(given, text):
    with pytest.raises(ConfigError, match=text):
        check_degrees(GIVEN | given)


def test_neighbouring_ranks_lie_along_the_last_axis():
    degrees = Degrees(dp_replicate=2, dp_shard=2, cp=1, tp=2)
    assert degrees.along(5, ["tp"]) == [4, 5]
    assert degrees.along(5, ["dp_shard"]) == [5, 7]
    assert degrees.along(5, ["dp_replicate", "dp_shard"]) == [1, 3, 5, 7]
    assert [degrees.place(rank, ["dp_replicate", "dp_shard"]) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [degrees.place(rank, ["tp"]) for rank in range(8)] == [0, 1] * 4
    assert degrees.along(3, []) == [3]


def test_only_degrees_above_one_are_told():
    assert Degrees(dp_shard=2, tp=4).axes == {"dp_shard": 2, "tp": 4}
    assert Degrees().axes == {}
    assert str(Degrees(dp_shard=2, tp=4)) == "dp_replicate=1 x dp_shard=2 x tp=4"
