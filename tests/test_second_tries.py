"""CI keeps a record of tests that passed only at the second try, and fails on one that is there twice."""

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

CI = Path(__file__).parents[1] / ".ci"


@pytest.fixture
def tries(tmp_path):
    """Return a function that runs the program after two runs of the tests; it returns the exit code and the text."""

    def run(*words, first=None, now=None):
        lists = []
        for name, tests in (("first", first), ("now", now)):
            if tests is not None:
                (tmp_path / name).write_text(json.dumps(dict.fromkeys(tests, True)))
                lists.append(str(tmp_path / name))
        environ = {**os.environ, "ECHELON_SECOND_TRIES": str(tmp_path / "kept" / "record.tsv")}
        command = [sys.executable, str(CI / "second_tries.py"), *lists, *words]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
        return done.returncode, done.stdout + done.stderr

    return run


def test_a_test_that_needs_a_second_try_twice_is_an_error_until_it_is_mended(tries):
    code, told = tries(first=["a.py::one", "a.py::two[x y]"], now=["a.py::two[x y]"])
    assert (code, told.count("a.py::one"), told.count("two")) == (0, 1, 0)  # the other one has failed for good
    assert tries(first=["a.py::two[x y]"], now=[])[0] == 0
    code, told = tries(first=["a.py::one"], now=[])
    assert code == 1
    assert "a.py::one needed a second try more than once: mend it, then run" in told
    assert tries()[0] == 1  # also after a run without any failure
    code, told = tries("--forget", "a.py::one")
    assert code == 0
    assert "a.py::one" not in told
    assert "a.py::two[x y]" in told


def test_what_is_long_ago_is_forgotten(tries, tmp_path):
    days_ago = [datetime.now(UTC) - timedelta(days=days) for days in (31, 29)]
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "record.tsv").write_text("".join(f"{day.isoformat()}\tabc\ta.py::one\n" for day in days_ago))
    code, told = tries()
    assert code == 0
    assert told.count("a.py::one") == 1
    assert tries(first=["a.py::one"], now=[])[0] == 1


def test_one_list_alone_is_refused(tries):
    code, told = tries(first=["a.py::one"])
    assert code == 2
    assert "give the lists after both runs, or none; got 1" in told
