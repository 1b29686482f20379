"""benchmarks/fsdp.py and experts.py run, at a size too small to time, and count what a rank holds to the byte."""

import json
from pathlib import Path

import pytest
from programs import run_program

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.only_in_sweep  # test_model_parallel_benchmark.py has two ranks against a script
@pytest.mark.parametrize("script", ["experts.py", "fsdp.py"])
def test_a_rank_holds_a_quarter_of_the_whole(script, tmp_path):
    size = ("--steps", "1", "--warmup", "0", "--rounds", "1", "--contests", "1", "--json")
    done = run_program(BENCHMARKS / script, *size, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout[done.stdout.index("{") :])
    assert list(result["contenders"]) == ["by hand", "echelon", "echelon barebones"]
    assert result["memory"]["ratio"] == pytest.approx(1.0, abs=0.1)
    assert list(tmp_path.iterdir()) == []
