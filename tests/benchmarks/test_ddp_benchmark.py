"""The DDP benchmark runs, at a size too small to measure anything, and prints what it promises."""

import json
from pathlib import Path

import pytest
from programs import run_program
from sweep import IS_SWEEP

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ddp.py"
SIZE = ("--steps", "2", "--warmup", "1", "--rounds", "1", "--contests", "1", "--no-lightning", "--json")
MODELS = ["mlp", "resnet", "gpt"] if IS_SWEEP else ["mlp"]


@pytest.mark.sweep
def test_ddp_trains_models_by_hand_and_by_echelon(tmp_path):
    done = run_program(SCRIPT, "--models", *MODELS, *SIZE, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    models = json.loads(done.stdout)["models"]
    assert list(models) == MODELS
    for rows in models.values():
        assert list(rows) == ["by hand", "echelon", "echelon barebones"]
        for row in rows.values():
            [[[clock, _]]] = row["rounds"]
            assert row["us_per_step"] == pytest.approx(clock) and clock > 0
    assert list(tmp_path.iterdir()) == []
