"""A run that is killed again and again, in one process or in several, ends like an undisturbed run.

`make soak` kills a hundred times, and ranks of every strategy thirty times each.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from programs import ForkedProgram


def test_kills_change_no_bit_of_weights_and_curve(tmp_path: Path) -> None:
    output = run("kill_anywhere.py", tmp_path, "5")
    assert "landed: " in output


@pytest.mark.parametrize("layout", ["ddp", pytest.param("elastic", marks=pytest.mark.only_in_sweep)])
def test_kills_of_a_rank_the_caller_or_all_change_no_bit_of_a_run_of_ranks(memory_path: Path, layout: str) -> None:
    output = run("kill_strategies.py", memory_path, "--kills", "1", "--layouts", layout)
    assert f"{layout}: 1 kills" in output


def run(script: str, *words: str | Path) -> str:
    """Run a program of this folder to its end, and return its output; check that none of its processes is left."""
    folder = Path(__file__).parent
    with tempfile.TemporaryDirectory() as place:
        written = Path(place, "output")
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = ForkedProgram([folder / script, *words], folder=folder, environ=environ, output=written)
        try:
            process.wait(timeout=400)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and what it has forked
            process.wait()
        output = written.read_text()
    assert process.returncode == 0, output[-6000:]
    end = time.monotonic() + 60  # fork servers end when they see that their client has
    while is_there(process.pid):
        assert time.monotonic() < end, "a process is left"
        time.sleep(0.05)
    return output


def is_there(group: int) -> bool:
    """Return whether a process of a group is."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
