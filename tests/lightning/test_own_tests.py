"""The decisions about Lightning's own tests: each has a kind and a reason, and counts for the failure that it names."""

from __future__ import annotations

import own_tests
from own_tests import Decision, Result


def test_each_decision_has_a_kind_and_each_departure_is_a_row_of_the_page() -> None:
    decided, rows = own_tests.decisions(), own_tests.rows()
    assert {one.kind for one in decided} <= own_tests.KINDS.keys()
    assert [one for one in decided if not (one.test and one.failure and one.reason)] == []
    assert {one.reason for one in decided if one.kind == "departs"} - rows == set()
    assert [one for one in decided if one.test in ("*", "test_*")] == []
    assert len(set(decided)) == len(decided)


def test_a_test_that_fails_otherwise_is_undecided() -> None:
    decided = [Decision("a.py", "test_b", "KeyError: 'x'", "inside", "loop object")]
    failed = [
        Result("a.py", "test_b[1]", "failed", "KeyError: 'x'"),
        Result("a.py", "test_b[2]", "failed", "ValueError"),
        Result("a.py", "test_bc", "failed", "KeyError: 'x'"),
        Result("a.py", "test_d", "passed"),
        Result("a.py", "test_e", "skipped"),
    ]
    lines, undecided, unused = own_tests.table(failed, decided)
    assert undecided == failed[1:3] and unused == []
    assert lines[:2] == ["4 tests of 1 files run on this machine", "     1 pass"]
    assert own_tests.table(failed[3:], decided)[2] == decided
