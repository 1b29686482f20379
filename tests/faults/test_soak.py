"""A run with random faults for some seconds continues after each, leaves nothing behind, and loses nothing."""

from pathlib import Path

import pytest
from programs import run_program

SCRIPT = Path(__file__).with_name("soak.py")


@pytest.mark.only_in_sweep  # tests/elastic has each fault
def test_random_faults_neither_hang_a_run_nor_change_its_curve_nor_leave_anything(memory_path):
    # enough snapshots for each round to get further than the previous one, and to start without a delay
    size = ("--minutes", "0.1", "--every", "1.2", "1.8", "--snapshot-every", "4", "--pause", "0.03")
    actions = ("--actions", "kill", "exit", "raise")
    words = (SCRIPT, *size, *actions, "--keep", memory_path, "--patience", "240")
    done = run_program(*words, folder=memory_path, timeout=460)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "differs from that of an undisturbed run by" in done.stdout
