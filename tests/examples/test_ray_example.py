"""examples/ray_train.py gives the same numbers without Ray and in Ray's workers, one of which is killed."""

import importlib.util
import sys
import tempfile
import uuid
from pathlib import Path

import pytest
from two_nodes import run_together

SCRIPT = str(Path(__file__).parents[2] / "examples" / "ray_train.py")


@pytest.mark.timeout(580)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason='pip install "ray[train]", 500 MB, to run it')
def test_two_workers_of_ray_and_a_crash_end_with_the_numbers_of_one_process(tmp_path):
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # its sockets need a short path
        own = {"RAY_TMPDIR": folder, "HOME": folder, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex * 2}
        one = [sys.executable, SCRIPT, "--workers", "0", "--run", "one"]
        two = [sys.executable, SCRIPT, "--crash-at", "30"]
        done = run_together([(one, {}), (two, own)], timeout=560, cwd=tmp_path)
    assert [code for code, _ in done] == [0, 0], done[1][1]
    alone, in_ray = ([line for line in output.splitlines() if " steps: " in line] for _, output in done)
    assert in_ray == alone and alone[0].startswith("72 steps: loss 0.")
    assert (tmp_path / "ray_run" / "has_crashed").exists()
