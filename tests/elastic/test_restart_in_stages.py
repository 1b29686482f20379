"""Elastic runs of pipelines: stages that die, and nodes with stages that are lost, return, or leave too few."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from elastic_nodes import EXACT, Undisturbed, difference, nodes_of_a_run, train_amid_a_kill
from elastic_program import BATCH, Plan, TiedRegression, samples
from torch.utils.data import DataLoader, TensorDataset

from echelon import ParallelStrategy

STEPS = 9
TWO = Plan(
    epochs=1, steps=STEPS, strategy="pp", devices=2, is_tied=True, last_call=60.0
)  # both come before the first step


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return Undisturbed.run(tmp_path_factory.mktemp("undisturbed"), 1, steps=STEPS, is_tied=True)


def test_a_stage_is_killed(memory_path: Any, undisturbed: Any) -> None:
    inner = ParallelStrategy(pp=2, dp_shard=2)
    loader = DataLoader(TensorDataset(*samples()), BATCH // 4, shuffle=True)
    weights = train_amid_a_kill(inner, STEPS, memory_path, TiedRegression, loader)
    assert difference(weights, undisturbed.weights) <= EXACT


@pytest.mark.only_in_sweep
def test_a_node_is_lost_and_the_other_has_all_stages(memory_path: Any, undisturbed: Any) -> None:
    with nodes_of_a_run(memory_path, TWO) as nodes:
        weights = nodes.lose_one(chaos="lose:node=1@step=5")
    nodes.check_no_scar(weights, undisturbed)


def test_a_node_in_place_of_a_lost_one_gets_what_its_stage_shares_with_others(
    memory_path: Any, undisturbed: Any
) -> None:
    with nodes_of_a_run(memory_path, replace(TWO, nodes="2", chaos="lose:node=1@step=8")) as nodes:
        both = [nodes.start(slot) for slot in range(2)]
        nodes.wait(lambda _: any(one.process.poll() is not None for one in both), "a node is lost")
        left = next(one for one in both if one.process.poll() is None)
        weights = nodes.finish(left, nodes.start(1))
    nodes.check_no_scar(weights, undisturbed)
    assert "resumes from step 6" in left.log.read_text()


def test_nodes_that_may_be_too_few_for_the_stages_are_refused_at_the_start(memory_path: Any) -> None:
    with nodes_of_a_run(memory_path, replace(TWO, devices=1)) as nodes:
        assert nodes.end(nodes.start()) == 1, nodes.told()
    assert "pp = 2, but world_size is 1; choose degrees whose product" in nodes.told()
