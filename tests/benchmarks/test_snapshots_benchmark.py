"""The snapshot benchmark runs, at a size too small to measure anything, and counts what it promises."""

import json
import math
from pathlib import Path

import pytest
from programs import run_program

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "snapshots.py"


@pytest.mark.only_in_sweep
def test_runs_with_and_without_snapshots_are_compared(tmp_path):
    size = ("--runs", "1", "--steps", "40", "--warmup", "2", "--context", "8", "--width", "8", "--depth", "1")
    done = run_program(SCRIPT, *size, "--heads", "1", "--batch-size", "2", "--json", folder=tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["snapshots"] >= 1
    assert all(found[name] > 0 for name in ("step_ms", "step_without_ms", "stall_ms", "cost_ms"))
    assert math.isfinite(found["share_by_the_clock"])
    assert list(tmp_path.iterdir()) == []
