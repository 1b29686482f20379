"""The DDP benchmark runs, at a size too small to measure anything, and prints what it promises."""

import json
from pathlib import Path

import pytest
from programs import run_program

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ddp.py"


def test_ddp_trains_every_model_by_hand_and_by_echelon(tmp_path):
    words = ("--steps", "2", "--warmup", "1", "--rounds", "1", "--contests", "1", "--no-lightning", "--json")
    done = run_program(SCRIPT, *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    models = json.loads(done.stdout)["models"]
    assert list(models) == ["mlp", "resnet", "gpt"]
    for rows in models.values():
        assert list(rows) == ["by hand", "echelon", "echelon barebones"]
        for row in rows.values():
            [[[clock, _]]] = row["rounds"]
            assert row["us_per_step"] == pytest.approx(clock) and clock > 0
    assert list(tmp_path.iterdir()) == []
