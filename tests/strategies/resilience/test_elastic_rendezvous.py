"""Nodes meet, join, leave and are lost; the store outlives each of them, and its own loss is reported."""

import base64
import contextlib
import json
import os
import pickle
import socket
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from ports import free_port
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousJoinOp
from two_nodes import run_together, two_nodes

from echelon.common.errors import ConfigError, ProcessError
from echelon.strategies.cluster import start_wait
from echelon.strategies.resilience.elastic_rendezvous import ManyNodes, OneNode, SpareError, make_rendezvous
from echelon.strategies.resilience.store_process import KEPT, reach_store

MEMBER = Path(__file__).with_name("member_of_nodes.py")
HELPERS = MEMBER.parents[2] / "helpers"
LIMIT = timedelta(seconds=240)


@pytest.fixture(scope="module")
def endpoint():
    """Where nodes may meet, each run under its own id."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set(KEPT, "")
    yield f"127.0.0.1:{store.port}"
    del store


@pytest.fixture
def node(endpoint):
    """Create nodes of one run."""
    run_id, made = uuid.uuid4().hex, []

    def make(nodes=(1, 4), **changes):
        settings = {"run_id": run_id, "start_timeout": LIMIT, "last_call": timedelta(seconds=0.3)}
        made.append(make_rendezvous(**{"nodes": nodes, "endpoint": endpoint, **settings, **changes}))
        return made[-1]

    yield make
    for one in made:
        one.release()


def wait_until(condition):
    end = time.monotonic() + LIMIT.total_seconds()
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def meet(*nodes):
    """Have all of these meet, as agents do; return their ranks, and the port on which workers meet."""

    def take_part(one):
        info = one.next_rendezvous()
        while info.world_size < len(nodes):
            wait_until(lambda: one.num_nodes_waiting() or one.num_nodes_lost())
            info = one.next_rendezvous()
        return info

    with ThreadPoolExecutor(len(nodes)) as threads:
        found = list(threads.map(take_part, nodes))
    assert {info.world_size for info in found} == {len(nodes)}
    [port] = {info.bootstrap_store_info.master_port for info in found}
    return [info.rank for info in found], port


def test_one_node_meets_itself_on_loopback_again_and_again():
    one = make_rendezvous(nodes=(1, 1), endpoint=None, run_id="run", start_timeout=LIMIT)
    assert isinstance(one, OneNode)
    ranks, port = meet(one)
    files = len(os.listdir("/proc/self/fd"))
    one.notices.post("key", "value")
    ports = {meet(one)[1] for _ in range(5)}
    assert ranks == [0]
    assert port not in ports
    assert len(os.listdir("/proc/self/fd")) == files
    assert one.notices.read("key") == one.notices_at.connect().read("key") == "value"
    assert (one.num_nodes_waiting(), one.num_nodes_lost()) == (0, 0)
    one.leave()
    one.release()


def test_nodes_come_and_leave(node):
    first, second = node(), node()
    assert isinstance(first, ManyNodes)
    assert meet(first)[0] == [0]
    first.notices.post("key", "value")
    assert meet(first, second)[0] == [0, 1]
    assert second.notices.read("key") == second.notices_at.connect().read("key") == "value"
    assert (first.num_nodes_lost(), second.num_nodes_lost()) == (0, 0)
    second.leave()
    assert first.num_nodes_lost() == 1
    assert meet(first)[0] == [0]


def test_a_node_of_which_nothing_is_heard_is_no_longer_alive_when_another_goes_on_and_learns_of_it(node):
    silent, other = node(), node()
    meet(silent)
    ends = []
    silent.tell_while_heard(ends.append)
    wait_until(lambda: len(ends) > 2)  # with each sign of life
    silent._stop_heartbeats()  # as if its process were stopped
    assert meet(other)[0] == [0]
    assert ends[-1] < time.monotonic()
    assert silent.num_nodes_lost() == 1  # though there are as many nodes as before


def test_all_meet_again_at_once_when_none_is_missing(node):
    first, second = (node(nodes=(1, 4), last_call=timedelta(seconds=1)) for _ in range(2))
    _, port = meet(first, second)
    for one in (first, second):
        one.settings.timeout._set_timeouts(last_call=LIMIT)
    before = time.monotonic()
    ranks, other = meet(first, second)
    assert time.monotonic() - before < LIMIT.total_seconds() / 2
    assert ranks == [0, 1]
    assert other != port


def test_more_nodes_than_are_wanted_stand_by(node):
    first, second, spare = (node(nodes=(1, 2)) for _ in range(3))
    meet(first, second)
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(spare.next_rendezvous)
        wait_until(lambda: first.num_nodes_waiting() or first._state_holder.state.redundancy_list)
        assert (first.num_nodes_waiting(), coming.done()) == (0, False)
        second.leave()
        wait_until(first.num_nodes_waiting)
        assert first.next_rendezvous().world_size == coming.result().world_size == 2
        coming = thread.submit(second.next_rendezvous)
        wait_until(lambda: first.num_nodes_waiting() or first._state_holder.state.redundancy_list)
        assert first.shutdown()
        with pytest.raises(SpareError, match="ended while this node was on standby, because 2 others took part"):
            coming.result()
    first.release()
    assert spare.num_nodes_lost() == 0


def test_a_node_that_is_lost_while_all_meet(node):
    first, second = (node(nodes=(1, 2), last_call=LIMIT) for _ in range(2))
    second._store.set_timeout(timedelta(seconds=1))
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(second.next_rendezvous)
        first._op_executor.run(_RendezvousJoinOp(), time.monotonic() + LIMIT.total_seconds())
        assert first._get_world() == (0, 2)  # and of this node nothing is heard any more
        second.settings.timeout._set_timeouts(last_call=timedelta(seconds=0.3))
        assert coming.result().world_size == 1


def test_too_few_nodes(node, endpoint, monkeypatch, caplog):
    monkeypatch.setattr(start_wait, "_FIRST", 0.2)
    told = f"1 of at least 2 nodes connected to {endpoint} within start_timeout=0.5 s; start the program on 1 more"
    with pytest.raises(ProcessError, match=told):
        node(nodes=(2, 4), start_timeout=timedelta(seconds=0.5)).next_rendezvous()
    waited_for = f"Waiting for 1 more of at least 2 nodes to connect to {endpoint}; giving up in 0 s"
    assert caplog.messages[0].startswith(waited_for)


def test_a_wait_that_is_cancelled(node, endpoint):
    alone = node(nodes=(2, 4))
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(alone.next_rendezvous)
        wait_until(lambda: alone._state_holder.state.participants)
        alone.cancel()
        with pytest.raises(ProcessError, match=f"The wait for other nodes at {endpoint} was canceled"):
            waiting.result()


def test_a_run_that_is_over(node, endpoint):
    first, second = node(), node()
    meet(first)
    assert first.shutdown()
    told = f"at {endpoint} is over; give the next run another run ID"
    with pytest.raises(ProcessError, match=told):
        second.next_rendezvous()
    with pytest.raises(ProcessError, match=told):
        node()


def test_what_others_put_in_the_store_is_not_run(node, endpoint, tmp_path):
    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "was here"),)

    one = node()
    meet(one)
    one._link.store.set(one._link._key, base64.b64encode(pickle.dumps(Payload())).decode())
    told = rf"The store at {endpoint} holds something other than the state of a rendezvous \(it holds posix.mkdir\)"
    for call in (one.num_nodes_waiting, one.num_nodes_lost, one.next_rendezvous):
        with pytest.raises(ProcessError, match=told):
            call()
    assert list(tmp_path.iterdir()) == []


def test_agents_that_start_at_once_have_one_store_which_ends_with_their_run():
    port = free_port()
    barrier = threading.Barrier(3)

    def start():
        barrier.wait()
        return make_rendezvous(nodes=(3, 3), endpoint=f"127.0.0.1:{port}", run_id="run", start_timeout=LIMIT)

    with ThreadPoolExecutor(3) as threads:
        nodes = [one.result() for one in [threads.submit(start) for _ in range(3)]]
    assert sorted(meet(*nodes)[0]) == [0, 1, 2]
    nodes[0].notices.post("key", "of this run")
    for one in nodes:
        assert one.shutdown()
        one.release()
    again = make_rendezvous(nodes=(1, 3), endpoint=f"127.0.0.1:{port}", run_id="run", start_timeout=LIMIT)
    assert not again.notices.has("key")
    again.set_closed()
    again.release()
    wait_until(lambda: not is_listening(port))


def is_listening(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def test_no_store():
    told = r"There is no store for the rendezvous at 127\.0\.0\.2:1 .* `echelon rendezvous --listen 127\.0\.0\.2:1`"
    with pytest.raises(ProcessError, match=told):
        reach_store("127.0.0.2", 1, timedelta(seconds=0.1))


@pytest.mark.parametrize(
    ("endpoint", "told"),
    [
        (None, "endpoint must be HOST:PORT for nodes=1:4, got None; give"),
        ("127.0.0.1:port", "The endpoint '127.0.0.1:port' cannot be resolved"),
        ("no-such-host.invalid", "The endpoint 'no-such-host.invalid' cannot be resolved"),
    ],
)
def test_endpoints_that_cannot_be(endpoint, told):
    with pytest.raises(ConfigError, match=told):
        make_rendezvous(nodes=(1, 4), endpoint=endpoint, run_id="run", start_timeout=LIMIT)


def test_a_machine_that_dies_leaves_the_store_to_the_others_and_one_that_vanishes_takes_it_away():
    with two_nodes() as nodes:
        environ = {"PYTHONPATH": str(HELPERS)}
        done = run_together([(one.command(sys.executable, str(MEMBER), "10.77.0.1:29500"), environ) for one in nodes])
    assert [code for code, _ in done] == [-9, 0], "\n".join(output for _, output in done)
    [[first], [second, alone, told, error]] = [
        [json.loads(line) for line in output.splitlines() if line.startswith("{")] for _, output in done
    ]
    here, there = "10.77.0.1", "10.77.0.2"
    assert first == {"rank": 0, "total": 2, "main_address": here, "listening": ["01004D0A:733C"]}
    assert second == {"rank": 1, "total": 2, "main_address": here, "listening": []}
    assert alone == {"rank": 0, "total": 1, "main_address": there, "listening": []}
    assert told == {"shared": "the first"}
    assert error["error"].startswith("The store at 10.77.0.1:29500 no longer answers")
    assert error["seconds"] < 120.0
