"""The benchmark of snapshots runs, at a size that measures nothing, and counts what it promises."""

import json
import math
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "snapshots.py"


def test_runs_with_and_without_snapshots_are_compared(tmp_path):
    size = ("--runs", "1", "--steps", "40", "--warmup", "2", "--context", "8", "--width", "8", "--depth", "1")
    command = [sys.executable, str(SCRIPT), *size, "--heads", "1", "--batch-size", "2", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["snapshots"] >= 1
    assert all(found[name] > 0 for name in ("step_ms", "step_without_ms", "stall_ms", "cost_ms"))
    assert math.isfinite(found["share_by_the_clock"])
    assert list(tmp_path.iterdir()) == []
