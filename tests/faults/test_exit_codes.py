"""What a signal makes of a process: the step finished, a checkpoint, and the code that SLURM and Kubernetes go by."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_one_signal_saves_and_ends_with_the_documented_code_and_a_second_ends_at_once(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("signalled.py")), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=360, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    saved = ["epoch=0-step=4.ckpt"]
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        ["SIGTERM", 143, saved, True],
        ["SIGUSR1", 143, saved, True],
        ["SIGINT", 130, saved, True],
        ["SIGTERM, SIGTERM", 143, [], True],
        ["SIGINT, SIGINT", 130, [], True],
        ["SIGUSR1, SIGTERM", 143, [], True],
    ]
