"""The benchmarks run, at a size that measures nothing, and print what they promise."""

import json
from pathlib import Path

import pytest
from programs import run_program

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(name, *arguments, folder):
    done = run_program(BENCHMARKS / name, *arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


SIZE = ("--steps", "3", "--warmup", "1", "--rounds", "2", "--contests", "2")


def test_overhead_prints_every_contender_relative_to_the_plain_loop(tmp_path):
    lines = run("overhead.py", *SIZE, folder=tmp_path).splitlines()
    assert lines[0].split() == ["us/step", "ratio", "+-", "excess"]
    assert lines[1].startswith("plain loop") and float(lines[1].split()[-3]) == 1.0
    assert {line[:22].strip() for line in lines[2:4]} == {"echelon", "echelon barebones"}
    assert list(tmp_path.iterdir()) == []


def test_overhead_as_json_holds_every_turn(tmp_path):
    result = json.loads(run("overhead.py", *SIZE, "--json", folder=tmp_path))
    assert result["steps"] == 3
    for row in result["contenders"].values():
        turns = [clock for contest in row["rounds"] for clock, _ in contest]
        assert len(turns) == 4 and row["us_per_step"] == pytest.approx(sum(turns) / 4)
        assert row["ratio"] == pytest.approx(1 / row["speed"])
