"""Where hanging workers are: in Python, in C, stopped, or not yet able to be asked."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

from echelon.common.proc_status import catches_signal, children_of
from echelon.strategies.launch.stack_dumps import dump_stacks
from echelon.strategies.launch.worker import SHOW_STACKS

REGISTER = "import faulthandler, sys; faulthandler.register(int(sys.argv[2]), open(sys.argv[1], 'w'))"
STUCK_IN_PYTHON = """
import threading
def waits_for_ever(): threading.Event().wait()
print(flush=True); waits_for_ever()
"""
# PyDLL keeps the interpreter's lock: no Python code can run in this process, in no thread
STUCK_IN_C = """
import ctypes
def is_deep_in_c():
    while True: ctypes.PyDLL(None).sleep(1000)
print(flush=True); is_deep_in_c()
"""
FORKED = """
import os, threading
def waits_in_a_fork():
    print(flush=True)
    threading.Event().wait()
waits_in_a_fork() if os.fork() == 0 else os.wait()
"""


@contextmanager
def process(folder, rank, code, *, registers=True):
    script = f"{REGISTER if registers else ''}\n{code}"
    arguments = [sys.executable, "-S", "-c", script, str(folder / f"{rank}.stacks"), str(int(SHOW_STACKS))]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as child:
        try:
            child.stdout.readline()
            yield child.pid
        finally:
            child.kill()


def test_each_tells_where_it_stands_or_why_it_cannot(tmp_path):
    with (
        process(tmp_path, 0, STUCK_IN_PYTHON) as python,
        process(tmp_path, 1, STUCK_IN_C) as c,
        process(tmp_path, 2, STUCK_IN_PYTHON) as stopped,
        process(tmp_path, 3, STUCK_IN_PYTHON, registers=False) as young,
    ):
        os.kill(stopped, signal.SIGSTOP)
        os.waitid(os.P_PID, stopped, os.WSTOPPED | os.WNOWAIT)
        texts = dump_stacks({0: python, 1: c, 2: stopped, 3: young, 4: 2**22 + 1}, tmp_path)
        assert not catches_signal(young, SHOW_STACKS)
        assert list(texts) == [0, 1, 2, 3, 4]
        assert "in waits_for_ever" in texts[0]
        assert "in is_deep_in_c" in texts[1]
        assert texts[2].startswith("It is stopped and cannot answer")
        assert "State: T (stopped)" in texts[2]
        assert "wchan: " in texts[2]
        assert texts[3].startswith("It is still being started and cannot answer")
        assert texts[4].startswith("It has ended")
        os.kill(young, 0)  # the signal would have killed it


def test_a_second_dump_tells_of_now(tmp_path):
    with process(tmp_path, 0, STUCK_IN_PYTHON) as pid:
        assert dump_stacks({0: pid}, tmp_path)[0].count("most recent call first") == 1
        assert dump_stacks({0: pid}, tmp_path)[0].count("most recent call first") == 1


def test_what_a_worker_has_forked_tells_where_it_stands(tmp_path):
    with process(tmp_path, 3, FORKED) as pid:
        (forked,) = children_of(pid)
        try:
            own, of_forked = dump_stacks({3: pid}, tmp_path)[3].split(f"Process {forked} (")
        finally:
            os.kill(forked, signal.SIGKILL)
    assert "most recent call first" in own
    assert "which rank 3 has started" in of_forked
    assert "in waits_in_a_fork" in of_forked
