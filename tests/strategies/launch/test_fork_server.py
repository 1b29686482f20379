"""The fork server changes the caller's process only for a moment, and ends without a word."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from echelon.strategies.launch.fork_server import preload_modules


def test_threads_that_ask_for_it_at_once_leave_the_environment_as_it_was():
    before = dict(os.environ)
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(preload_modules, ["colorsys"]) for _ in range(400)]:
            done.result()
    assert dict(os.environ) == before


@pytest.mark.only_in_sweep
def test_nothing_is_written_after_the_end_of_the_program():
    program = "from echelon.testing import run_ranks; import os; run_ranks(os.getpid, 1); print('the end')"
    # returns once the fork server, which ends last, has closed what it inherited
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout, done.stderr) == ("the end\n", "")
