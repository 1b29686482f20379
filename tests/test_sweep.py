"""Tables of cases: `make test` takes some pairs of each row and column, `make sweep` takes all."""

import re
from collections import Counter
from pathlib import Path

import pytest
import sweep

TESTS = Path(__file__).parent


def test_each_row_meets_as_many_columns_as_there_are_steps_and_in_a_sweep_all(monkeypatch):
    rows, columns = range(7), "abcd"
    monkeypatch.setattr(sweep, "IS_SWEEP", False)
    pairs = sweep.dealt(rows, columns, (0, 2))
    assert Counter(row for row, _ in pairs) == dict.fromkeys(rows, 2)
    assert {*Counter(column for _, column in pairs).values()} == {3, 4}
    assert len({*pairs}) == len(pairs)
    monkeypatch.setattr(sweep, "IS_SWEEP", True)
    assert len({*sweep.dealt(rows, columns, (0, 2))}) == 28


def test_what_takes_more_cases_in_a_sweep_is_marked():
    asking = [
        path
        for path in TESTS.rglob("test_*.py")
        if re.search("^from sweep import (?!only_in_sweep$)", path.read_text(), re.MULTILINE)
    ]
    assert asking
    assert [path.name for path in asking if "pytest.mark.sweep" not in path.read_text()] == []


@pytest.mark.parametrize("case", ["anywhere", pytest.param("in a sweep", marks=pytest.mark.only_in_sweep)])
def test_cases_marked_so_run_in_a_sweep_alone(case):
    assert case == "anywhere" or sweep.IS_SWEEP
