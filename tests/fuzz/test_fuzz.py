"""Mutated checkpoints, configs and run folders end in an Echelon error, and in nothing else."""

from __future__ import annotations

import os
from pathlib import Path

from programs import run_program


def test_two_hundred_mutations_end_in_an_error_of_echelon_or_in_nothing(tmp_path: Path) -> None:
    words = (Path(__file__).with_name("fuzz.py"), "200", "--from", "1000000")
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = run_program(*words, folder=tmp_path, timeout=1200, environ=environ)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "200 cases, 0 faults" in process.stdout
