"""The GPU tests run: on a machine without a GPU nobody else would see that the code has moved away from them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROGRAMS = sorted(path.name for path in HERE.glob("test_*.py") if path.name != Path(__file__).name)
LEAST = {"test_gpu_sharded.py": 24}
"""The file that looks furthest inside, and the number of its tests; the others run in a sweep."""


@pytest.mark.timeout(480)
@pytest.mark.parametrize(
    "program",
    [pytest.param(name, marks=[] if name in LEAST else pytest.mark.only_in_sweep) for name in PROGRAMS],
)
def test_the_gpu_tests_pass_on_the_cpu_that_can(program):
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", HERE / program],
        env={**os.environ, "GPU_TESTS_ON": "cpu"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:]
    assert program not in LEAST or f"{LEAST[program]} passed" in run.stdout
