"""Every strategy takes the steps of one process, on real processes, and the page of results lists every case."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from matrix import ALONE, CASES, LINES, UNEVEN, compare, largest, run, train
from once import once

from echelon.strategies.placement import BY_NAME

PAGE = Path(__file__).parents[2] / "docs" / "equivalence.md"
ONE_PROCESS = LINES[0]
STRATEGIES = {line.strategy for line in LINES if line.is_named}
CELLS = [(line, case) for line in LINES for case in line.tested_cases]
WITH_ENGINE = [line for line in LINES if line.has_engine]
LAUNCHED = {line.strategy: line for line in LINES if line.processes == 2 and line.is_named}


@pytest.fixture(scope="module")
def ends_of():
    """Return the ends of the tested cases of a line on each rank; the first request for a line waits for its run."""
    return once(lambda line: run(line, line.tested_cases))


@pytest.fixture(scope="module")
def expected_of(ends_of):
    """Return the end of a case for a network on one process."""
    return lambda network, case: ends_of(ALONE[network])[case][0]


def check(end, expected, case):
    found = compare(end, expected)
    assert found.state <= case.bound, found
    assert found.metrics <= case.bound, f"{found}: {end.metrics} for {expected.metrics}"
    assert found.callback_metrics <= max(case.bound, 1e-5), f"{end.callback_metrics} for {expected.callback_metrics}"
    assert found.counts == 0, f"{end} for {expected}"


@pytest.mark.sweep
@pytest.mark.parametrize(("line", "case"), CELLS, ids=[f"{line.title}-{case.title}" for line, case in CELLS])
def test_every_rank_ends_like_one_process(line, case, ends_of, expected_of):
    for end in ends_of(line)[case]:
        check(end, expected_of(line.network, case), case)


@pytest.mark.parametrize("line", WITH_ENGINE, ids=[line.title for line in WITH_ENGINE])
def test_a_custom_loop_ends_like_the_trainer_on_one_process(line, ends_of, expected_of):
    ends = {case: states for case, states in ends_of(line).items() if case.by_engine}
    assert len(ends) > 5
    for case, states in ends.items():
        expected = expected_of("dense", replace(case, by_engine=False)).state
        bound = 0 if line is ONE_PROCESS else case.bound
        assert max(largest(state, expected) for state in states) <= bound, case


@pytest.mark.parametrize("line", LAUNCHED.values(), ids=LAUNCHED)
def test_a_fit_that_starts_processes_ends_in_the_caller_like_one_process(line, expected_of):
    case = next(case for case in CASES if case.optimizer == "sgd" and case.accumulate == 2 and case.samples == UNEVEN)
    check(train(case, line, devices=line.processes), expected_of(line.network, case), case)


def test_every_strategy_is_in_the_matrix():
    assert set(BY_NAME) == STRATEGIES, "give each a Line of LINES in tests/equivalence/matrix.py"


def test_the_page_of_the_results_has_every_line_and_case():
    table = PAGE.read_text().partition("\n|")[2].partition("\n\n")[0]
    rows = [re.split(r" *\| *", row.strip("| ")) for row in table.splitlines()]
    remedy = "run `python tests/equivalence/table.py`"
    assert rows[0][1:] == [line.title for line in LINES if line is not ONE_PROCESS], remedy
    assert [row[0] for row in rows[2:]] == [case.title for case in CASES], remedy
