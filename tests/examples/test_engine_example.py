"""examples/engine.py trains in one process and continues in two, with shards."""

from pathlib import Path

import torch
from programs import run_program

from echelon import load_weights

SCRIPT = Path(__file__).parents[2] / "examples" / "engine.py"


def train(folder, *options):
    done = run_program("-W", "error", SCRIPT, *options, folder=folder)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout, load_weights(folder / "gpt.ckpt")


def test_two_processes_go_on_from_one(tmp_path):
    told, weights = train(tmp_path, "--max-steps", "1")
    assert told.startswith("step 0: loss 5.5")
    _, after = train(tmp_path, "--strategy", "fsdp", "--devices", "2", "--max-steps", "2", "--resume")
    assert all(not torch.equal(value, weights[name]) for name, value in after.items())
