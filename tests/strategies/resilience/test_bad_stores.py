"""Failing stores and clocks: a silent rendezvous, a store that is stopped or killed, clocks that jump."""

import contextlib
import functools
import os
import pickle
import re
import signal
import socket
import threading
import time
import uuid
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import torch
from ports import free_port
from programs import WatchedProgram, run_program
from sweep import only_in_sweep

from echelon.common.errors import ProcessError
from echelon.strategies.cluster.tcp_store import connect_store
from echelon.strategies.resilience.elastic_rendezvous import make_rendezvous
from echelon.strategies.resilience.store_process import CLOCK, LIFE

torch_rendezvous = pytest.importorskip("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
LIMIT = timedelta(seconds=240)


@pytest.fixture
def silent():
    """A server that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = []

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    taken.append(server.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]
        for connection in taken:
            connection.close()
        server.shutdown(socket.SHUT_RDWR)


def test_a_rendezvous_that_accepts_and_says_nothing_is_given_up_after_the_start_timeout(silent):
    began = time.monotonic()
    with pytest.raises(ProcessError, match=rf"There is no store for the rendezvous at 127.0.0.1:{silent} after start_"):
        make_rendezvous(nodes=(1, 2), endpoint=f"127.0.0.1:{silent}", run_id="run", start_timeout=timedelta(seconds=2))
    assert time.monotonic() - began < 60


def test_a_store_that_says_nothing_is_given_up_where_torch_tries_again(silent, monkeypatch):
    monkeypatch.setattr(torch.distributed, "TCPStore", functools.partial(more_patient, torch.distributed.TCPStore))
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        connect_store("127.0.0.1", silent, timedelta(seconds=1))
    assert time.monotonic() - began < 60


def more_patient(store, *args, timeout, **options):
    """Torch's timeout begins after ours, and later on a busy machine."""
    return store(*args, timeout=4 * timeout, **options)


def store_of(port):
    """Return the process that serves the rendezvous at a port."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if f"serve('127.0.0.1', {port}," in path.read_text():
                return int(path.parent.name)
    raise AssertionError(f"no store at {port}")


PROGRAM = """
import sys, time
from datetime import timedelta
from pathlib import Path
sys.path.append(sys.argv[3])
from small import Regression, loader, quiet
from echelon import Callback
from echelon.strategies.elastic import ElasticStrategy
from echelon.strategies.resilience import store_process

store_process._SILENCE = 3

class Says(Callback):
    def on_train_step_end(self, trainer, module):
        Path(sys.argv[2]).touch()
        time.sleep(0.1)

strategy = ElasticStrategy("ddp", nodes="1:2", rdzv=sys.argv[1], last_call=timedelta(seconds=0.1))
quiet(strategy=strategy, devices=1, max_steps=1000, callbacks=[Says()]).fit(Regression(), loader())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_store_that_is_lost_in_a_run_ends_it_with_a_word(number, tmp_path):
    port, started = free_port(), tmp_path / "started"
    lost = {}

    def lose():
        while not started.exists():
            time.sleep(0.05)
        lost["pid"], lost["at"] = store_of(port), time.monotonic()
        os.kill(lost["pid"], number)

    threading.Thread(target=lose, daemon=True).start()
    helpers = Path(__file__).parents[2] / "helpers"
    try:
        done = run_program("-c", PROGRAM, f"127.0.0.1:{port}", started, helpers, folder=tmp_path, timeout=320)
    finally:
        if "pid" in lost:
            with contextlib.suppress(ProcessLookupError):
                os.kill(lost["pid"], signal.SIGKILL)
    assert done.returncode == 1
    assert time.monotonic() - lost["at"] < 100
    told = rf"ProcessError: The store at 127\.0\.0\.1:{port} no longer answers .*; start the run again"
    assert re.search(told, done.stderr), done.stderr[-3000:]


SERVED = """
import sys
from echelon.strategies.cluster.tcp_store import listen_on_address
from echelon.strategies.resilience import store_process

store_process._IDLE = 3
port = int(sys.argv[1])
store_process.serve("127.0.0.1", port, listen_on_address("127.0.0.1", port).detach())
"""


def test_a_store_that_stood_still_for_long_waits_for_its_nodes_and_ends_without_them(tmp_path):
    port = free_port()
    with contextlib.closing(WatchedProgram(["-c", SERVED, str(port)], folder=tmp_path)) as program:
        store = connect_store("127.0.0.1", port, LIMIT)

        def live_on(seconds):
            """Send signs of life once a second on the store's clock, as nodes do."""
            last, end = store.add(CLOCK, 0), time.monotonic() + seconds
            while time.monotonic() < end:
                if (now := store.add(CLOCK, 0)) - last >= 1000:
                    last = now
                    store.add(LIFE, 1)
                time.sleep(0.05)

        live_on(2)
        for _ in range(2):
            os.kill(program.pid, signal.SIGSTOP)
            time.sleep(5)
            os.kill(program.pid, signal.SIGCONT)
            live_on(2)
        assert program.poll() is None
        assert program.wait(LIMIT.total_seconds()) == 0


class Jumping(datetime):
    """The clock of this process, as torch's rendezvous reads it; it can be set forward or back."""

    ahead = timedelta(0)

    @classmethod
    def now(cls, tz=None):
        return datetime.now(tz) + cls.ahead


OTHER = """
import sys, time
from datetime import timedelta
from echelon.strategies.resilience.elastic_rendezvous import make_rendezvous
limit = timedelta(seconds=240)
node = make_rendezvous(nodes=(2, 2), endpoint=sys.argv[1], run_id=sys.argv[2], start_timeout=limit)
node.next_rendezvous()
end = time.monotonic() + 6
while time.monotonic() < end:
    assert node.num_nodes_lost() == 0
    time.sleep(0.05)
print("never lost the other")
node.release()
"""


@pytest.mark.parametrize("seconds", [30, *only_in_sweep(-30)])
def test_a_clock_that_jumps_loses_nobody(seconds, monkeypatch, tmp_path):
    endpoint, run_id = f"127.0.0.1:{free_port()}", uuid.uuid4().hex
    other = WatchedProgram(["-c", OTHER, endpoint, run_id], folder=tmp_path)
    node = make_rendezvous(nodes=(2, 2), endpoint=endpoint, run_id=run_id, start_timeout=LIMIT)
    try:
        node.next_rendezvous()
        monkeypatch.setattr(torch_rendezvous, "datetime", Jumping)
        monkeypatch.setattr(time, "time", lambda now=time.time: now() + Jumping.ahead.total_seconds())
        time.sleep(1)
        monkeypatch.setattr(Jumping, "ahead", timedelta(seconds=seconds))  # both clocks at once, as a jump does
        end = time.monotonic() + 3
        while time.monotonic() < end:
            assert node.num_nodes_lost() == 0
            time.sleep(0.05)
        assert "never lost the other" in other.communicate()[0]
    finally:
        other.close()
        node.release()


def test_a_clock_that_jumps_between_reading_and_writing_the_state_makes_nobody_late(monkeypatch):
    endpoint, run_id = f"127.0.0.1:{free_port()}", uuid.uuid4().hex
    node = make_rendezvous(
        nodes=(1, 2), endpoint=endpoint, run_id=run_id, start_timeout=LIMIT, last_call=timedelta(seconds=0.1)
    )
    try:
        node.next_rendezvous()
        node._stop_heartbeats()
        state, token = node._link.get_state()
        monkeypatch.setattr(time, "time", lambda now=time.time: now() + 30)
        state, token, _ = node._link.set_state(state, token)
        (heard,) = pickle.loads(state).last_heartbeats.values()
        assert heard.timestamp() == pytest.approx(time.time(), abs=5)
    finally:
        node.release()
