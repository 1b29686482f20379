"""The checkpoint benchmark runs, at a size that measures nothing, and prints what it promises."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "checkpoint.py"


def test_it_prints_every_figure_with_its_limit(tmp_path):
    command = [sys.executable, str(SCRIPT), "--small", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    limited = [line for line in lines if "limit" in line]
    assert len(limited) == 7
    assert any(line.startswith("async save, stall") for line in limited)
    assert sum("peak memory" in line for line in lines) == 5
    assert list(tmp_path.iterdir()) == []
