"""Samples that are not there leave no trace: each sample counts once, whichever rank has fewer of them than others."""

import functools

import pytest
import torch
from missing_samples import (
    CELLS,
    KINDS,
    NUMBERS_OF_LOOPS,
    OWN_LOOPS,
    STAGES,
    Layout,
    checked,
    in_own_loop,
    program,
    run_all,
)
from once import once

from echelon.testing import run_ranks

pytestmark = pytest.mark.sweep

BY_TITLE = {layout.title: layout for layout, _ in CELLS}
TITLES = pytest.mark.parametrize("title", BY_TITLE)
LOOPS = pytest.mark.parametrize(("strategy", "processes"), OWN_LOOPS)


@pytest.fixture(scope="module")
def ends_of():
    """Return what every program has left on each rank, by the number of processes; they start once."""
    return once(lambda processes: run_ranks(run_all, processes, processes, timeout=420))


@pytest.fixture(scope="module")
def records_of(ends_of):
    """Return the records of a layout: of each number of samples, what each rank has."""

    def get(title):
        ends = ends_of(BY_TITLE[title].processes)
        numbers = [number for layout, number in CELLS if layout.title == title]
        return {number: checked([end[title, number] for end in ends]) for number in numbers}

    return get


@functools.cache
def alone(global_batch, kind, number):
    """Return the record of one process that takes the same steps."""
    return program(Layout("single", 1, lambda: "single", {"global_batch_size": global_batch}, kind=kind), number)


def values_of(number, num_loaders=1):
    return sorted([float(value) for value in range(1, number + 1)] * num_loaders)


def joined(records, stage, kind):
    """Return the traces of all data ranks together, of which each counts once.

    Ranks of one replica hold the same samples; a stage of a pipeline that does not run this part of a step has none.
    """
    of_replicas = {}
    for record in records:
        trace = record["traces"][stage][kind]
        if trace:
            known = of_replicas.setdefault(record["data_rank"], trace)
            assert trace == known, f"ranks of one replica have {trace} and {known}"
    found = of_replicas.values()
    return sum(found) if kind in ("metric", "dict") else sorted(value for trace in found for value in trace)


@pytest.mark.parametrize("stage", STAGES)
@TITLES
def test_each_sample_leaves_one_trace(title, stage, records_of):
    layout = BY_TITLE[title]
    num_loaders = layout.num_loaders if stage in ("sanity check", "fit's validation", "validate") else 1
    found, right = {}, {}
    for number, records in records_of(title).items():
        values = values_of(number, num_loaders)
        for kind in KINDS:
            if not (kind == "module-level list" and layout.is_checked):
                found[number, kind] = joined(records, stage, kind)
                right[number, kind] = sum(values) if kind in ("metric", "dict") else values
    assert found == right


@TITLES
def test_a_logged_metric_has_each_sample_once(title, records_of):
    layout = BY_TITLE[title]
    for number, records in records_of(title).items():
        right = number * (number + 1) / 2
        validated = [right] * layout.num_loaders
        stages = {"training": [right], "fit's validation": validated, "validate": validated, "test": [right]}
        assert [record["logged"] for record in records] == [stages] * layout.processes, number


@TITLES
def test_predict_returns_each_sample_once_in_order(title, records_of):
    for number, records in records_of(title).items():
        assert [record["predictions"] for record in records] == [values_of(number)] * len(records)


@TITLES
def test_the_weights_are_those_of_one_process(title, records_of):
    layout = BY_TITLE[title]
    for number, records in records_of(title).items():
        expected = alone(layout.global_batch, layout.kind, number)["weights"]
        for record in records:
            torch.testing.assert_close(record["weights"], expected, rtol=0, atol=1e-12)


@LOOPS
def test_a_custom_loop_has_each_sample_once(strategy, processes, ends_of):
    for number in [number for place, number in NUMBERS_OF_LOOPS if place == (strategy, processes)]:
        records = checked([end["own loop", strategy, number] for end in ends_of(processes)])
        for kind in ("training", "evaluation"):
            assert sorted(value for record in records for value in record["seen"][kind]) == values_of(number)
        assert [sorted(record["seen"]["gathered"]) for record in records] == [values_of(number)] * processes
        expected = in_own_loop("single", number)["weights"]
        for record in records:
            torch.testing.assert_close(record["weights"], expected, rtol=0, atol=1e-12)


@LOOPS
def test_a_rank_without_samples_draws_no_random_numbers(strategy, processes, ends_of):
    of_ranks = checked([end["drawing", strategy] for end in ends_of(processes)])
    without = [is_as_before for steps in of_ranks for num_steps, is_as_before in steps if num_steps > 0]
    assert without == [True] * (processes - 1)
