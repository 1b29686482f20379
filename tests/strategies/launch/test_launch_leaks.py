"""Nothing stays of a launch: no process, thread, port, descriptor, semaphore, file or memory. 200 in the benchmark."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "launch.py"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_stays_of_launches(tmp_path):
    command = [sys.executable, str(BENCHMARK), "--json", "--rounds", "1", "--launches", "8"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    counted = json.loads(done.stdout)
    before, after = counted["before"], counted["after"]
    for name in ("megabytes", "megabytes_below"):
        assert after.pop(name) < before.pop(name) + 4  # a launch that kept what its workers hold would keep 300
    assert after == before
    assert before["processes"] == 2  # Python's fork server and resource tracker
    assert before["sockets"] == before["temporary"] == 0
    assert counted["launch"] < counted["imports"]
