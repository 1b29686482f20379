"""A step leaves traces of each sample once wherever a program keeps them: files, databases, globals, callbacks."""

import pytest
from missing_samples import checked
from traces_elsewhere import LAYOUTS, LISTED, NUMBER, PHASES, SUMMED, run_all

from echelon.testing import run_ranks

pytestmark = pytest.mark.sweep
BY_TITLE = {layout.title: layout for layout in LAYOUTS}
TITLES = pytest.mark.parametrize("title", BY_TITLE)
IN_PHASES = pytest.mark.parametrize("phase", PHASES)


@pytest.fixture(scope="module")
def left_by():
    """Return what a layout's steps have left on each rank in a phase; each number of processes starts once."""
    found = {}

    def get(title, phase):
        processes = BY_TITLE[title].processes
        if processes not in found:
            found[processes] = None  # a failed start is not repeated
            found[processes] = run_ranks(run_all, processes, processes, timeout=240)
        assert found[processes] is not None, f"the start of {processes} processes failed: see its first test"
        return [left[phase] for left in checked([end[title] for end in found[processes]])]

    return get


@pytest.mark.parametrize("place", [place for place in LISTED if place != "logger"])
@IN_PHASES
@TITLES
def test_each_sample_is_noted_once(title, phase, place, left_by):
    noted = [value for left in left_by(title, phase) for value in left[place]]
    assert sorted(noted) == [float(value) for value in range(1, NUMBER + 1)]


@pytest.mark.parametrize("place", SUMMED)
@IN_PHASES
@TITLES
def test_each_sample_is_counted_once(title, phase, place, left_by):
    assert sum(left[place] for left in left_by(title, phase)) == NUMBER


@IN_PHASES
@TITLES
def test_each_sample_of_rank_0_is_logged_once(title, phase, left_by):
    first, *others = left_by(title, phase)
    assert first["logger"] == first["right of this rank"]
    assert all(other["logger"] == [] for other in others)


@IN_PHASES
@TITLES
def test_a_moving_average_has_the_batches_of_its_rank(title, phase, left_by):
    for left in left_by(title, phase):
        assert left["moving average"] == left["right moving average"]
