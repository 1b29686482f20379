"""A run that suffers random faults for some seconds goes on after each, leaves nothing behind, and has lost nothing."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("soak.py")


def test_random_faults_neither_hang_a_run_nor_change_its_curve_nor_leave_anything(memory_path):
    size = ("--minutes", "0.2", "--every", "2", "3", "--actions", "kill", "exit", "raise", "--pause", "0.01")
    command = [sys.executable, str(SCRIPT), *size, "--keep", str(memory_path), "--patience", "40"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=115, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "the curve is that of no faults" in done.stdout
