"""examples/moe.py reaches the same loss wherever its experts are."""

import re
from pathlib import Path

from programs import run_program

SCRIPT = Path(__file__).parents[2] / "examples" / "moe.py"


def told(folder, *options):
    done = run_program("-W", "error", SCRIPT, "--max-steps", "2", *options, folder=folder)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_experts_are_dealt_and_the_loss_is_that_of_one_process(tmp_path):
    text = told(tmp_path, "--devices", "2", "--ep", "2", "--balance", "0.01")
    assert "blocks.0.experts.stack" in text
    losses = [re.findall(r"^Loss after 2 steps: (\d+\.\d{9})$", each, re.MULTILINE)
              for each in (text, told(tmp_path, "--balance", "0.01"))]  # fmt: skip
    assert losses[0] == losses[1] != []
