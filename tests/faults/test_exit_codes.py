"""Signals to a process: the step is finished, a checkpoint saved, and the exit code fits SLURM and Kubernetes."""

from __future__ import annotations

import json
import os
import time
import uuid
from pathlib import Path

from forked_server import MARK
from programs import ForkedProgram, run_program
from two_nodes import kill_marked, running

SIGNALLED = Path(__file__).with_name("signalled.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def test_one_signal_saves_and_ends_with_the_documented_code_and_a_second_ends_at_once(tmp_path: Path) -> None:
    done = run_program(SIGNALLED, tmp_path, folder=tmp_path, timeout=360, environ=ENVIRONMENT)
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


def test_a_fork_whose_step_never_ends_ends_with_the_program_that_is_killed(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    words, output = (SIGNALLED, tmp_path, "SIGTERM, SIGTERM"), tmp_path / "output"
    process = ForkedProgram(words, folder=tmp_path, environ={**ENVIRONMENT, MARK: mark}, output=output)
    try:
        wait_for_processes(mark, 2)
        process.kill()
        process.wait()
        wait_for_processes(mark, 0)
    finally:
        kill_marked(mark)
        process.wait()


def wait_for_processes(mark: str, number: int) -> None:
    """Wait until there are this many processes with a mark."""
    end = time.monotonic() + 120
    while len(running(mark)) != number:
        assert time.monotonic() < end, f"not {number}: {running(mark)}"
        time.sleep(0.01)
