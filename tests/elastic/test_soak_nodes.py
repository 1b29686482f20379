"""A run on two nodes whose cable, processes and clocks fail continues after each fault, and loses nothing."""

import subprocess
import sys
from pathlib import Path

import pytest
from two_nodes import two_nodes

SCRIPT = Path(__file__).with_name("soak_nodes.py")


@pytest.mark.timeout(600)
def test_faults_of_two_nodes_leave_no_scar(memory_path):
    with two_nodes():  # or the test is skipped
        pass
    # the worst for who writes: rank 0 is on the node that is cut off from the store, stopped or killed
    kinds = ("--stores", "1", "--kinds", "jump", "partition", "stop_node", "kill_agent")
    # how long the run stalls is for the long soak to judge, on an otherwise idle machine
    options = ("--bound", "inf", "--longest", "4", "--pause", "0.15", "--keep", str(memory_path))
    command = [sys.executable, str(SCRIPT), *kinds, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "no scar" in done.stdout
