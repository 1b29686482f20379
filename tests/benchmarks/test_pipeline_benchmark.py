"""benchmarks/pipeline.py runs, at a size too small to time, and counts what stages hold to the byte."""

import json
from pathlib import Path

import pytest
from programs import run_program

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "pipeline.py"
IDLE = {"4": 1 / 5, "8": 1 / 9, "16": 1 / 17}
"""The share of idle time in theory, by the number of micro-batches."""


@pytest.mark.only_in_sweep  # test_model_parallel_benchmark.py has two ranks against a script
def test_a_rank_holds_its_own_stage_and_idle_shares_are_beside_the_theory(tmp_path):
    size = ("--steps", "1", "--warmup", "0", "--rounds", "1", "--contests", "1", "--idle-runs", "1", "--json")
    done = run_program(SCRIPT, *size, "--idle-numbers", *IDLE, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout[done.stdout.index("{") :])
    assert list(result["contenders"]) == ["by hand", "echelon", "echelon barebones"]
    assert result["memory"]["ratio"] == pytest.approx(1.0, abs=0.01)
    assert {number: shares["theory"] for number, shares in result["idle"].items()} == pytest.approx(IDLE)
    assert all(0 < shares["measured"] < 1 for shares in result["idle"].values())
    assert list(tmp_path.iterdir()) == []
