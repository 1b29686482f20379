"""Elastic runs with layers cut over ranks: workers that die, nodes that leave, and too few nodes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from elastic_nodes import EXACT, Undisturbed, difference, nodes_of_a_run, train_amid_a_kill
from elastic_program import TP_PLAN, Plan, Regression

from echelon import ParallelStrategy

STEPS = 8
TWO = Plan(epochs=1, steps=STEPS, strategy="tp", devices=2, last_call=60.0)  # both come before the first step


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return Undisturbed.run(tmp_path_factory.mktemp("undisturbed"), 1, steps=STEPS)


def test_a_worker_is_killed(memory_path: Any, undisturbed: Any) -> None:
    inner = ParallelStrategy(dp_shard=2, tp=2, tp_plan=TP_PLAN)
    weights = train_amid_a_kill(inner, STEPS, memory_path, Regression)
    assert difference(weights, undisturbed.weights) <= EXACT


@pytest.mark.only_in_sweep
def test_a_node_is_lost_and_the_other_goes_on_with_fewer_shards(memory_path: Any, undisturbed: Any) -> None:
    with nodes_of_a_run(memory_path, TWO) as nodes:
        weights = nodes.lose_one(chaos="lose:node=1@step=5")
    nodes.check_no_scar(weights, undisturbed)


def test_a_number_of_ranks_that_layers_cannot_be_cut_for_is_a_clear_stop(memory_path: Any) -> None:
    with nodes_of_a_run(memory_path, TWO) as nodes:
        nodes.hold_after(5)
        # the run has no end but the one that the third node brings
        start = partial(nodes.start, devices=1, nodes="2:3", last_call=1.0, epochs=1 << 20, steps=-1)
        both = [start(slot) for slot in range(2)]
        nodes.wait(lambda seen: seen["step"] >= 5, "two nodes train")
        third = start(1)
        assert [nodes.end(one) for one in (*both, third)] == [1, 1, 1], nodes.told()
    assert "tp = 2, but world_size is 3; choose degrees whose product divides 3" in nodes.told()
    assert "is not started again" in nodes.told()
