"""Training that is killed again and again ends with the very weights of training in peace."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_forty_kills_and_resumes_change_no_bit_of_the_weights(tmp_path: Path) -> None:
    script = Path(__file__).with_name("killed_training.py")
    command = [sys.executable, str(script), str(tmp_path), "40"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=115, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
