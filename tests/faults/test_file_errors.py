"""An error of any single file call while a run saves ends it in order on all ranks, or not at all."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(("ranks", "stride"), [(1, 1), (2, 25)])
def test_each_call_may_fail(ranks: int, stride: int) -> None:
    script = Path(__file__).with_name("file_errors.py")
    process = subprocess.Popen(
        [sys.executable, str(script), "--ranks", str(ranks), "--errors", "1", "--stride", str(stride)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=960)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    assert process.returncode == 0, output[-6000:]
    assert f"in {ranks} processes" in output
    assert " 0 faults" in output
