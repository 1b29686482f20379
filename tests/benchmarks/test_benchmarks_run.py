"""The benchmarks run, at a size too small to measure anything, and print what they promise."""

import itertools
import json
from pathlib import Path

import pytest
from programs import run_program
from sweep import IS_SWEEP

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(name, *arguments, folder):
    done = run_program(BENCHMARKS / name, *arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


SIZE = ("--steps", "3", "--warmup", "1", "--rounds", "2", "--contests", "2")
TABLE = ("--steps", "2", "--warmup", "1", "--rounds", "1", "--contests", "2")


@pytest.mark.sweep
def test_overhead_prints_every_kind_of_run_relative_to_the_plain_loop(tmp_path):
    words = [] if IS_SWEEP else ["--step-us", "300"]
    title, header, *lines = run("overhead.py", *TABLE, *words, folder=tmp_path).splitlines()
    assert title.split()[:7] == ["plain", "loop", "echelon", "engine", "echelon", "echelon", "barebones"]
    assert header.split()[:6] == ["loader", "optimizer", "us/step", "ratio", "+-", "excess"]
    kinds = itertools.product(
        ("shuffled", "ready", "iterable", "list"), ("100", "300") if IS_SWEEP else ("300",), ("sgd", "adam")
    )
    assert [line.split()[:3] for line in lines] == [[loader, name, step] for loader, step, name in kinds]
    assert all(float(cell) > 0 for line in lines for cell in line.split()[3:5])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("clock", "index"), [("wall", 0), pytest.param("cpu", 1, marks=pytest.mark.only_in_sweep)])
def test_overhead_of_one_kind_as_json_holds_every_turn(clock, index, tmp_path):
    kind = {"loader": "iterable", "optimizer": "sgd", "step_us": 100}
    words = [word for name, value in kind.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    result = json.loads(run("overhead.py", *SIZE, "--json", "--clock", clock, *words, folder=tmp_path))
    assert result["steps"] == 3
    [found] = result["kinds"]
    contenders = found.pop("contenders")
    assert found == kind and contenders["plain loop"]["ratio"] == 1.0
    assert list(contenders)[:3] == ["plain loop", "echelon engine", "echelon"]
    for row in contenders.values():
        turns = [turn[index] for contest in row["rounds"] for turn in contest]
        assert len(turns) == 4 and row["us_per_step"] == pytest.approx(sum(turns) / 4)
        assert row["ratio"] == pytest.approx(1 / row["speed"])


@pytest.mark.slow
def test_overhead_of_comparing_replicas_is_printed_by_size(tmp_path):
    _, *lines = (
        line for line in run("overhead.py", "--replicas", folder=tmp_path).splitlines() if "processes" not in line
    )
    assert [line.split()[0] for line in lines] == ["100,000", "1,000,000", "10,000,000"]
    assert all(float(cell) > 0 for line in lines for cell in line.split()[2:])


def test_data_prints_every_kind_of_data_set_relative_to_torchs_own_loop(tmp_path):
    title, header, *lines = run("data.py", *TABLE, folder=tmp_path).splitlines()
    assert title.split()[:2] == ["torch", "echelon"]
    assert header.split()[:8] == ["kind", "sample", "a", "sample", "a", "batch", "ratio", "+-"]
    kinds = ["tensors", "items", "many items", "ready", "iterable", "lists", "dicts"]
    assert [(line[:14].strip(), line[14:20].strip()) for line in lines] == [
        *((kind, "0") for kind in kinds),
        *((kind, "100") for kind in kinds[1:]),
    ]
    assert list(tmp_path.iterdir()) == []


def test_data_of_one_kind_as_json_holds_every_turn(tmp_path):
    words = ("--kind", "many items", "--sample-us", "0")
    [found] = json.loads(run("data.py", *SIZE, "--json", *words, folder=tmp_path))["kinds"]
    assert (found["kind"], found["sample_us"]) == ("many items", 0)
    assert list(found["contenders"])[:2] == ["torch", "echelon"]
    for row in found["contenders"].values():
        turns = [cpu for contest in row["rounds"] for _, cpu in contest]
        assert len(turns) == 4 and row["us_per_step"] == pytest.approx(sum(turns) / 4)
