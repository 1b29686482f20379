"""A program that a test runs has imported what a new interpreter would, whatever other tests have sent to processes."""

from multiprocessing import forkserver

import pytest
from programs import run_program

from echelon.strategies.launch.fork_server import preload_modules

CODE = "import os, sys; print('wave' in sys.modules, os.getppid())"


@pytest.mark.only_in_sweep  # of the tests' own helpers
def test_a_program_does_not_see_what_the_fork_server_has_imported_for_others(tmp_path):
    forkserver._forkserver._stop()
    preload_modules(("wave",))
    of_ranks = forkserver._forkserver._forkserver_pid
    told = [run_program("-c", CODE, folder=tmp_path).stdout.split() for _ in range(2)]
    assert [is_there for is_there, _ in told] == ["False", "False"]
    assert told[0] == told[1]  # one server is enough
    assert int(told[0][1]) != of_ranks
    preload_modules(())
    assert forkserver._forkserver._forkserver_pid == of_ranks  # it has stayed
