"""The mark `slow` of conftest.py is there in time for `make test-fast`, which selects by it."""

from pathlib import Path

from programs import run_program

HERE = Path(__file__)


def test_tests_that_start_processes_are_left_out_where_slow_ones_are(tmp_path):
    words = ["-m", "pytest", HERE, HERE.parent / "test_layers.py", "-m", "not slow", "--collect-only", "--quiet"]
    # programs are forks, which may have imported a plugin already
    words += ["-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    done = run_program(*words, folder=tmp_path)
    assert "test_layers.py::" in done.stdout
    assert f"{HERE.name}::" not in done.stdout
