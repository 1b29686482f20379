"""Every strategy takes the steps of one process, on real processes, and the page of results lists every case."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from matrix import (
    ALONE,
    CASES,
    GLOBAL_BATCH,
    LINES,
    UNEVEN,
    cases_of_lines,
    compare,
    largest,
    pairs_of,
    run_together,
    train,
)
from once import once
from sweep import IS_SWEEP

from echelon.strategies.placement import BY_NAME

PAGE = Path(__file__).parents[2] / "docs" / "equivalence.md"
ONE_PROCESS = LINES[0]
STRATEGIES = {line.strategy for line in LINES if line.is_named}
TESTED = cases_of_lines()
CELLS = [(line, case) for line, (cases, _) in TESTED.items() for case in cases]
WITH_ENGINE = [line for line in LINES if line.has_engine]
LAUNCHED = {line.strategy: line for line in LINES if line.processes == 2 and line.is_named}


@pytest.fixture(scope="module")
def ends_of():
    """Return the ends of the tested cases of a line on each rank; the first request waits for lines that start with it.

    Those are the lines of as many processes and with the same network.
    """
    starting = {}
    for line, (cases, by_engine) in TESTED.items():
        if cases:
            starting.setdefault(line.start, []).append((line, [*cases, *by_engine]))
    get = once(lambda start: run_together(starting[start]))

    def ends(line):
        found = get(line.start)[line.title]
        assert not isinstance(found, str), found
        return found

    return ends


@pytest.fixture(scope="module")
def expected_of():
    """Return the end of a case for a network on one process, which trains it at the first request."""
    get = once(lambda key: train(key[1], ALONE[key[0]], devices=1))
    return lambda network, case: get((network, case))


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
    of_engine = TESTED[line][1]
    assert len(of_engine) > (5 if IS_SWEEP or line is ONE_PROCESS else 1)
    for case in of_engine:
        states = ends_of(line)[case]
        expected = expected_of("dense", replace(case, by_engine=False)).state
        bound = 0 if line is ONE_PROCESS else case.bound
        assert max(largest(state, expected) for state in states) <= bound, case


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, id=name, marks=[pytest.mark.only_in_sweep] * (name in ("zero", "local_sgd")))
        for name, line in LAUNCHED.items()
    ],
)
def test_a_fit_that_starts_processes_ends_in_the_caller_like_one_process(line, expected_of):
    case = next(case for case in CASES if case.optimizer == "sgd" and case.accumulate == 2 and case.samples == UNEVEN)
    case = replace(case, epochs=1, fewer=GLOBAL_BATCH)
    check(train(case, line, devices=line.processes), expected_of(line.network, case), case)


def test_each_two_settings_meet_on_several_lines_of_many_processes():
    met = Counter(pair for line, case in CELLS if line.processes > 1 for pair in pairs_of(case))
    assert {pair: met[pair] for case in CASES for pair in pairs_of(case) if met[pair] < 2} == {}


def test_every_strategy_is_in_the_matrix():
    assert set(BY_NAME) == STRATEGIES, "give each a Line of LINES in tests/equivalence/matrix.py"


def test_the_page_of_the_results_has_every_line_and_case():
    table = PAGE.read_text().partition("\n|")[2].partition("\n\n")[0]
    rows = [re.split(r" *\| *", row.strip("| ")) for row in table.splitlines()]
    remedy = "run `python tests/equivalence/table.py matrix`, with --lines TITLE for the columns that are new"
    assert rows[0][1:] == [line.title for line in LINES if line is not ONE_PROCESS], remedy
    assert [row[0] for row in rows[2:]] == [case.title for case in CASES], remedy
