"""Unplanned ends of a launch: exceptions in the user's handlers, signals that come at once, SIGKILL."""

import getpass
import os
import signal
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from programs import WatchedProgram, run_program

from echelon.strategies.cluster.environment import Environment
from echelon.strategies.launch.launcher import launch_workers
from echelon.strategies.launch.static_agent import StaticAgent
from echelon.strategies.launch.static_rendezvous import Rendezvous

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

ALONE = Environment("none", 0, 0, 0, 2, 2, 1, "127.0.0.1", None)
MINUTE = timedelta(minutes=1)


def launched(function, kind=StaticAgent):
    return launch_workers(function, lambda task: kind(task, 2, Rendezvous(ALONE, MINUTE)), is_local=True)


def is_there(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition):
    while not condition():  # the test's own time limit ends it
        time.sleep(0.02)


class Interrupting(StaticAgent):
    """An agent that gets another signal at the worst moment: while it holds a lock to pass on the first."""

    lock = threading.Lock()
    has_interrupted = False

    def cancel(self):
        with self.lock:
            if not self.has_interrupted:
                type(self).has_interrupted = True
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)
        super().cancel()


def test_a_second_signal_while_the_first_is_passed_on_kills_and_does_not_deadlock():
    caller = os.getpid()

    def run():
        signal.signal(signal.SIGTERM, lambda *_: None)
        os.kill(caller, signal.SIGTERM)
        time.sleep(600)

    with pytest.raises(SystemExit):
        launched(run, Interrupting)
    assert Interrupting.has_interrupted


class TooLongError(Exception):
    """The error that a decorator with a time limit raises in a handler of SIGALRM."""


def test_an_exception_of_the_users_own_handler_ends_the_workers_too(tmp_path):
    def give_up(*_):
        raise TooLongError

    def alarm():
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        os.kill(os.getpid(), signal.SIGALRM)

    def run():
        (tmp_path / str(os.getpid())).touch()
        time.sleep(600)

    before = signal.signal(signal.SIGALRM, give_up)
    threads = set(threading.enumerate())
    caller = threading.Thread(target=alarm)
    caller.start()
    try:
        with pytest.raises(TooLongError):
            launched(run)
    finally:
        signal.signal(signal.SIGALRM, before)
    caller.join()
    assert not any(is_there(int(path.name)) for path in tmp_path.iterdir())
    assert set(threading.enumerate()) <= threads


PROGRAM = """
import os, sys, time, torch
from pathlib import Path
from echelon.testing import run_ranks

weights = torch.full((1000,), 1.0)  # what a module or a data set holds

def run():
    Path(sys.argv[1], os.environ["RANK"]).write_text(str(weights.sum()))
    time.sleep(float(sys.argv[2]))

run_ranks(run, 2, timeout=600)
"""


def test_a_kill_leaves_nothing_that_the_next_launch_does_not_remove_and_no_password_was_in_a_file(tmp_path):
    seen = tmp_path / "seen"
    seen.mkdir()
    # the path of a socket must be short
    with tempfile.TemporaryDirectory(prefix="e-", dir="/tmp") as folder:
        kill_and_launch_again(tmp_path, Path(folder), seen)


def kill_and_launch_again(tmp_path, temporary, seen):
    (tmp_path / "program.py").write_text(PROGRAM)
    environ = {**os.environ, "TMPDIR": str(temporary), "TOKEN": "correct-horse-battery-staple"}
    program = WatchedProgram(["program.py", seen, "600"], folder=tmp_path, environ=environ)
    try:
        wait_until(lambda: len(list(seen.iterdir())) == 2 or program.poll() is not None)
        files = [path for path in temporary.rglob("*") if path.is_file()]
        assert not [path for path in files if b"horse-battery" in path.read_bytes()]
        assert sum(path.stat().st_size for path in files) < 1000
    finally:
        program.close()
    done = run_program("program.py", seen, "0", folder=tmp_path, environ=environ)
    assert done.returncode == 0, done.stderr
    # Python's folder of a killed fork server stays, with an empty socket: only a connection shows that nobody listens
    left = [path for path in temporary.iterdir() if not path.name.startswith("pymp-")]
    assert [path.name for path in left if path.name != f"torchinductor_{getpass.getuser()}"] == []
