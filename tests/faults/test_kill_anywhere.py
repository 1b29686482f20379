"""A run that is killed again and again, mostly while it writes a checkpoint, ends as the run that nobody killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest


def test_forty_kills_change_no_bit_of_weights_and_curve(tmp_path: Path) -> None:
    script = Path(__file__).with_name("kill_anywhere.py")
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path), "40"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=400)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # and what it has forked
        output, _ = process.communicate()
    assert process.returncode == 0, output[-6000:]
    with pytest.raises(ProcessLookupError):  # no process is left
        os.killpg(process.pid, 0)
