"""Every strategy takes the steps of one process, on real processes, and the page of the results names every case."""

import re
from pathlib import Path

import pytest
from matrix import CASES, LINES, compare, run, train

from echelon.strategies.by_name import _BY_NAME

PAGE = Path(__file__).parents[2] / "docs" / "equivalence.md"
ONE_PROCESS = LINES[0]
LAUNCHED = {line.strategy: line for line in reversed(LINES) if line.processes > 1 and line.nodes == 1}


@pytest.fixture(scope="module")
def expected():
    return [end for (end,) in run(ONE_PROCESS)]


@pytest.fixture(scope="module", params=LINES, ids=lambda line: line.title)
def ends(request):
    return run(request.param)


def check(end, expected, case):
    found = compare(end, expected)
    assert found.state <= case.bound, found
    assert found.metrics <= case.bound, f"{found}: {end.metrics} for {expected.metrics}"
    assert found.callback_metrics <= max(case.bound, 1e-5), f"{end.callback_metrics} for {expected.callback_metrics}"
    assert found.counts == 0, f"{end} for {expected}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_every_rank_ends_like_one_process(ends, expected, case):
    position = CASES.index(case)
    for end in ends[position]:
        check(end, expected[position], case)


@pytest.mark.parametrize("strategy", LAUNCHED)
def test_a_fit_that_starts_processes_ends_in_the_caller_like_one_process(strategy, expected):
    line, case = LAUNCHED[strategy], CASES[-5]
    check(train(case, line, devices=line.processes), expected[-5], case)


def test_every_strategy_is_in_the_matrix():
    assert {line.strategy for line in LINES} >= set(_BY_NAME)


def test_the_page_of_the_results_has_every_line_and_case():
    rows = [re.split(r" *\| *", row.strip("|\n ")) for row in PAGE.read_text().splitlines() if row.startswith("|")]
    assert rows[0][1:] == [line.title for line in LINES if line is not ONE_PROCESS]
    assert [row[0] for row in rows[2:]] == [case.title for case in CASES]
