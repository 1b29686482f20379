"""A run on two nodes whose cable, processes and clocks fail continues after each fault, and loses nothing."""

import subprocess
import sys
from pathlib import Path

import pytest
from two_nodes import two_nodes

SCRIPT = Path(__file__).with_name("soak_nodes.py")


@pytest.mark.only_in_sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "kinds", [("jump", "partition"), pytest.param(("stop_node", "kill_agent"), marks=pytest.mark.only_in_sweep)]
)
def test_faults_of_two_nodes_leave_no_scar(memory_path, kinds):
    with two_nodes():  # or the test is skipped
        pass
    # the worst for who writes: rank 0 is on the node that is cut off from the store, stopped or killed
    faults = ("--stores", "1", "--kinds", *kinds)
    # how long the run stalls is for the long soak to judge, on an otherwise idle machine
    options = ("--bound", "inf", "--longest", "4", "--pause", "0.15", "--keep", str(memory_path))
    command = [sys.executable, str(SCRIPT), *faults, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "no scar" in done.stdout
