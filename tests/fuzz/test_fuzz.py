"""Mutated checkpoints, configs and run folders end in an Echelon error, and in nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_two_hundred_mutations_end_in_an_error_of_echelon_or_in_nothing() -> None:
    script = Path(__file__).with_name("fuzz.py")
    process = subprocess.run(
        [sys.executable, str(script), "200", "--from", "1000000"],
        capture_output=True,
        text=True,
        timeout=1200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "200 cases, 0 faults" in process.stdout
