"""benchmarks/model_parallel.py runs, at a size too small to time, and counts what ranks hold and keep."""

import json
from pathlib import Path

import pytest
from programs import run_program
from sweep import IS_SWEEP

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "model_parallel.py"
LAYOUTS = ["tp 2", "tp 2 x fsdp 2"] if IS_SWEEP else ["tp 2"]


@pytest.mark.only_in_sweep
@pytest.mark.sweep
def test_a_rank_holds_what_the_plan_says_and_keeps_its_part_of_sequences(tmp_path):
    size = ("--steps", "1", "--warmup", "0", "--rounds", "1", "--contests", "1", "--json")
    done = run_program(SCRIPT, *size, "--layouts", *LAYOUTS, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout[done.stdout.index("{") :])
    for layout in LAYOUTS:
        assert list(result[layout]["contenders"]) == ["by hand", "echelon", "echelon barebones"]
        assert result[layout]["memory"]["ratio"] == pytest.approx(1.0, abs=0.1)
    assert result["activations"] <= 0.6
    assert list(tmp_path.iterdir()) == []
