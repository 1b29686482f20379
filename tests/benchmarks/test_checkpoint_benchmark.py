"""The checkpoint benchmark runs, at a size too small to measure anything, and prints what it promises."""

from pathlib import Path

from programs import run_program

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "checkpoint.py"


def test_it_prints_every_figure_with_its_limit(tmp_path):
    done = run_program(SCRIPT, "--small", "--folder", tmp_path, folder=tmp_path.parent)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    limited = [line for line in lines if "limit" in line]
    assert len(limited) == 7
    assert any(line.startswith("async save, stall") for line in limited)
    assert sum("peak memory" in line for line in lines) == 5
    assert list(tmp_path.iterdir()) == []
