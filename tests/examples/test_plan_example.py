"""examples/plan.py says which layouts fit, and draws them."""

from pathlib import Path

import pytest
from programs import run_program

SCRIPT = Path(__file__).parents[2] / "examples" / "plan.py"


@pytest.mark.only_in_sweep
def test_layouts_of_a_small_gpt_fit_and_are_drawn(tmp_path):
    done = run_program("-W", "error", SCRIPT, "--sizes", "0.1B", "--devices", "2", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    [line, drawn] = done.stdout.splitlines()
    assert line.startswith("0.1B: ")
    assert {"ddp", "fsdp", "zero"} <= set(line.removeprefix("0.1B: ").split(", "))
    assert drawn == "Drawn as gpt_layouts.png."
    assert (tmp_path / "gpt_layouts.png").read_bytes().startswith(b"\x89PNG")
