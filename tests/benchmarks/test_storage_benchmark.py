"""The storage benchmark runs, at a size too small to measure anything, and prints its ratios."""

import re
from pathlib import Path

import pytest
from programs import run_program

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "storage.py"


@pytest.mark.only_in_sweep
def test_saves_steps_and_a_resume_are_measured(tmp_path):
    done = run_program(SCRIPT, "--mb", "4", "--steps", "20", "--repeats", "1", folder=tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert re.search(r"^save +\d+ MB/s, \d\.\d\d of the plain upload$", done.stdout, re.MULTILINE)
    assert re.search(r"^steps +[\d.]+ ms; beside an upload", done.stdout, re.MULTILINE)
    read = re.search(r"^read to resume +([\d.]+) of the checkpoint's bytes", done.stdout, re.MULTILINE)
    assert 0.5 < float(read[1]) < 1.1
    assert list(tmp_path.iterdir()) == []
