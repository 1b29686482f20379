"""The GPU benchmark runs on the CPU, at a size too small to measure anything."""

import json
from pathlib import Path

from programs import run_program

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def test_both_contenders_are_measured(tmp_path):
    sizes = ("--device", "cpu", "--size", "tiny", "--no-compile", "--steps", "4", "--warmup", "1", "--rounds", "1")
    done = run_program(BENCHMARK, *sizes, "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    [row] = json.loads(done.stdout)
    assert row["size"] == "tiny" and not row["compiled"] and row["mfu"] is None
    assert row["by_hand"] > 0 and row["echelon"] > 0 and row["ratio"] > 0
    done = run_program(BENCHMARK, *sizes, folder=tmp_path)
    assert done.stdout.splitlines()[1].split()[:2] == ["size", "compiled"]
    assert list(tmp_path.iterdir()) == []
