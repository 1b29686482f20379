"""A launch leaves nothing: no process, thread, port, descriptor, semaphore, file or memory. 200 in the benchmark."""

import gc
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from programs import run_program
from sweep import only_in_sweep

from echelon.strategies.launch import launcher
from echelon.testing import run_ranks

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "launch.py"


@linux_only
def test_nothing_stays_of_launches(tmp_path):
    command = [sys.executable, str(BENCHMARK), "--json", "--rounds", "1", "--launches", "4"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=440, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    counted = json.loads(done.stdout)
    before, after = counted["before"], counted["after"]
    for name in ("megabytes", "megabytes_below"):
        assert after.pop(name) < before.pop(name) + 4  # a launch that kept what its workers hold would keep 300
    assert {name: count for name, count in after.items() if count > before[name]} == {}
    assert (after["processes"], after["threads"]) == (2, 1)  # Python's fork server and resource tracker, below
    assert after["sockets"] == after["shared_memory"] == after["temporary"] == 0
    assert counted["launch"] < counted["imports"]


@linux_only
@pytest.mark.parametrize("trainers", [*only_in_sweep(1), 2])
def test_nothing_stays_of_fits_with_a_parameter_server(trainers, tmp_path):
    """One trainer is this process, whose servers are started by another process each time."""
    words = ["--json", "--strategy", "ps", "--trainers", str(trainers), "--launches", "3"]
    done = run_program(BENCHMARK, *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout.splitlines()[-1])
    before, after = counted["before"], counted["after"]
    for name in ("megabytes", "megabytes_below"):
        assert after.pop(name) < before.pop(name) + 8  # a server that stayed would keep 100
    assert {name: count for name, count in after.items() if count > before[name]} == {}
    assert after["ports"] == after["shared_memory"] == 0
    # the socket of the fork server, or, with one trainer, that of the nursery and of this program's spare fork server
    assert after["sockets"] <= (2 if trainers == 1 else 1)
    assert after["temporary"] <= 1  # torch's cache


@pytest.fixture
def no_collection():
    """Exclude reference cycles that others have left from the count, but count those that a launch leaves."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def held():
    """Return the threads of this process, its descriptors, and its pieces of shared memory."""
    pieces = sum("/dev/shm/" in line for line in Path("/proc/self/maps").read_text().splitlines())
    return threading.active_count(), len(os.listdir("/proc/self/fd")), pieces


@linux_only
@pytest.mark.usefixtures("no_collection")
def test_a_launch_has_closed_all_when_it_returns_however_slow_its_threads_are():
    run_ranks(os.getpid, 2)  # the fork server stays
    before = held()

    def slow(frame, event, _):
        if event == "return" and frame.f_code.co_filename == launcher.__file__:
            time.sleep(0.3)

    threading.setprofile(slow)  # of threads that start from now on
    try:
        run_ranks(os.getpid, 2)
        assert held() == before
    finally:
        threading.setprofile(None)


@linux_only
@pytest.mark.usefixtures("no_collection")
def test_the_error_of_a_launch_that_the_caller_keeps_holds_nothing_open():
    def fail():
        raise ValueError("no")

    run_ranks(os.getpid, 2)
    before = held()
    with pytest.raises(ValueError, match="no") as caught:
        run_ranks(fail, 2)
    assert held() == before, caught
