"""Ray Train: its own TorchTrainer starts workers, replaces them, and adds more; our Trainer runs in them."""

import importlib.util
import sys
import tempfile
import uuid
from itertools import groupby
from pathlib import Path

import pytest
import torch
from ray_program import train
from two_nodes import run_together

from echelon import load_weights

PROGRAM = str(Path(__file__).with_name("ray_program.py"))
QUICK = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "1",  # 30 s by default, if a worker that is replaced does not answer
}


@pytest.mark.timeout(580)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason='pip install "ray[train]", 500 MB, to run it')
def test_a_run_that_grows_loses_a_worker_and_shrinks_ends_with_the_weights_of_one_process(tmp_path):
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # its sockets need a short path
        own = {"RAY_TMPDIR": folder, "HOME": folder, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex * 2}
        [(code, output)] = run_together([([sys.executable, PROGRAM, str(tmp_path)], QUICK | own)], timeout=560)
    assert code == 0, output
    steps = [tuple(map(int, line.split())) for line in (tmp_path / "steps").read_text().splitlines()]
    assert list(dict.fromkeys(world_size for world_size, _ in steps)) == [1, 3]
    assert steps[-1] == (3, 12)
    assert len(list(groupby(step - index for index, (_, step) in enumerate(steps)))) == 3, steps  # it went back twice

    train({"folder": tmp_path, "strategy": "single", "steps": 16, "callbacks": []})
    train({"folder": tmp_path / "one", "strategy": "single", "steps": 16, "callbacks": []})
    expected = load_weights(tmp_path / "one" / "last.ckpt")
    torch.testing.assert_close(load_weights(tmp_path / "last.ckpt"), expected, rtol=0, atol=1e-12)
