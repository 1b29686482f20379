"""benchmarks/finetune.py runs, at a size too small to measure anything, and prints both ratios."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from programs import run_program

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "finetune.py"
SIZE = ("--width", "16", "--memory-width", "16", "--steps", "2", "--warmup", "1", "--rounds", "2", "--contests", "1")


@pytest.mark.only_in_sweep  # each contender imports transformers in a process of its own
def test_each_contender_has_a_time_and_a_peak(tmp_path):
    pytest.importorskip("peft")
    pytest.importorskip("accelerate")
    contenders = ["plain loop", "echelon", "transformers", "accelerate"]
    contenders += ["lightning"] if find_spec("lightning") and find_spec("lightning.pytorch") else []
    done = run_program(SCRIPT, *SIZE, "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found["rows"]) == contenders
    assert all(row["us_per_step"] > 0 and row["peak_bytes"] >= 0 for row in found["rows"].values())
    assert all(row["first_seconds"] > 0 and row["import_seconds"] > 0 for row in found["rows"].values())
    assert set(found["ratio"]) == {"time", "memory", "memory by hand"}
