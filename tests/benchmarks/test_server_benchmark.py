"""benchmarks/parameter_server.py counts the bytes of a table's rows, benchmarks/staleness.py how stale pushes get."""

import re
from pathlib import Path

import pytest
from programs import run_program
from sweep import IS_SWEEP

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NUMBER = r"([0-9.]+)"


def test_a_step_with_a_server_stands_beside_that_of_ddp_and_a_table_moves_the_rows_of_a_batch(tmp_path):
    done = run_program(
        BENCHMARKS / "parameter_server.py", "--steps", "6", "--turns", "1", "--rows", "20000", folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    *_, dense, table = done.stdout.splitlines()
    found = re.fullmatch(rf"MLP: ps {NUMBER} ms, ddp {NUMBER} ms, ratio {NUMBER}", dense)
    assert found and all(float(number) > 0 for number in found.groups())
    found = re.fullmatch(rf"table: {NUMBER} ms, {NUMBER} kB a step and trainer, {NUMBER} x its rows", table)
    assert found and 1.0 <= float(found[3]) <= 1.2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.only_in_sweep
@pytest.mark.sweep
def test_no_push_with_random_delays_is_staler_than_allowed_and_fast_trainers_go_to_their_bound(tmp_path):
    steps = 500 if IS_SWEEP else 150  # of two trainers
    words = ("--steps", str(steps), "--max-staleness", "4", "--slow-steps", "40", "--slow-staleness", "6")
    done = run_program(BENCHMARKS / "staleness.py", *words, "--turn-trainers", "3", "--delay", "0.02", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    *_, ledger, steady, turns = (line for line in done.stdout.splitlines() if "ahead" in line)
    found = re.fullmatch(rf"ledger: (\d+) pushes, at most (\d+) steps ahead .*=4, {NUMBER} on the mean", ledger)
    assert found and int(found[1]) == 2 * steps
    assert 1 <= int(found[2]) <= 4 and 0 < float(found[3]) <= int(found[2])
    found = re.search(r"at most (\d+) steps ahead with max_staleness=6: ", steady)
    assert found and int(found[1]) == 6  # in 40 steps at half the speed
    windows = re.findall(rf"{NUMBER} x the steps over the first (\d+)", steady)
    assert [int(steps) for _, steps in windows] == [12, 16, 40]
    found = re.search(rf"^3 trainers .* at most (\d+) steps ahead with max_staleness=6: {NUMBER} x the steps", turns)
    assert found and 1 <= int(found[1]) <= 6
    assert all(float(ratio) > 0 for ratio in (*(ratio for ratio, _ in windows), found[2]))
    assert list(tmp_path.iterdir()) == []
