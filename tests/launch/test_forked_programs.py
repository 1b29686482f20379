"""A program that a test runs has imported what a new interpreter would, whatever other tests have sent to processes."""

from multiprocessing import forkserver

from programs import run_program

from echelon.strategies.launch.fork_server import preload

CODE = "import sys; print('wave' in sys.modules)"


def test_a_program_does_not_see_what_the_fork_server_has_imported_for_others(tmp_path):
    forkserver._forkserver._stop()
    preload(("wave",))
    first = forkserver._forkserver._forkserver_pid
    assert run_program("-c", CODE, folder=tmp_path).stdout == "False\n"
    plain = forkserver._forkserver._forkserver_pid
    assert plain != first
    assert run_program("-c", CODE, folder=tmp_path).stdout == "False\n"
    assert forkserver._forkserver._forkserver_pid == plain  # one restart is enough
