"""A node is lost, whatever the run is doing: the others continue to the same end, or stop and say why."""

import signal
import socket
from dataclasses import replace
from datetime import timedelta

import pytest
from elastic_nodes import Undisturbed, nodes_of, nodes_of_a_run
from elastic_program import Plan
from once import once
from torch.distributed import TCPStore

from echelon.strategies.resilience.store_process import LIFE

EPOCHS = 2
TWO = Plan(epochs=EPOCHS, strategy="ddp", last_call=60.0)  # both come before the first step


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """Return a function of a number of epochs that returns the undisturbed run."""
    return once(lambda epochs: Undisturbed.run(tmp_path_factory.mktemp("undisturbed"), epochs))


@pytest.fixture
def undisturbed(run_of):
    return run_of(EPOCHS)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "what",
    [
        pytest.param({"chaos": "lose:node=1@step=1"}, id="first_step"),
        pytest.param(
            {"chaos": "lose:node=1+delay=0.3@step=5", "sleeps": "0 1 5 20"},
            id="all_reduce",
            marks=pytest.mark.only_in_sweep,
        ),
        pytest.param({"chaos": "lose:node=1@snapshot=2", "strategy": "fsdp"}, id="snapshot"),
        pytest.param(
            {"chaos": "lose:node=0+delay=0.002@snapshot=2"}, id="snapshot_of_the_first", marks=pytest.mark.only_in_sweep
        ),
        pytest.param({"lost_at": "commit", "checkpoint_every": 5, "snapshot_every": 0}, id="checkpoint_commit"),
        pytest.param(
            {"chaos": "lose:node=1@validation=1", "epochs": 3}, id="evaluation", marks=pytest.mark.only_in_sweep
        ),
        pytest.param({"lost_at": "on_train_end"}, id="shutdown", marks=pytest.mark.only_in_sweep),
    ],
)
def test_a_node_is_lost(memory_path, run_of, what):
    with nodes_of_a_run(memory_path, TWO) as nodes:
        weights = nodes.lose_one(**what)
    nodes.check_no_scar(weights, run_of(what.get("epochs", EPOCHS)))


@pytest.mark.only_in_sweep
def test_workers_whose_agent_is_stopped_do_not_train_beside_those_that_go_on_without_them(memory_path, undisturbed):
    with nodes_of_a_run(memory_path, replace(TWO, last_call=1.0)) as nodes:
        nodes.hold_after(4)
        stopped = nodes.start(0)
        nodes.wait(lambda seen: seen["step"] >= 4, "one node trains")
        stopped.process.send_signal(signal.SIGSTOP)
        other = nodes.start(1)
        nodes.wait(lambda seen: seen["round"] > 0 and seen["step"] >= 6, "the other goes on alone")
        stopped.process.send_signal(signal.SIGCONT)
        nodes.wait(lambda seen: nodes_of(seen) == 2, "both train")
        weights = nodes.finish(stopped, other)
    nodes.check_no_scar(weights, undisturbed)
    rounds = [int(line.split()[1]) for line in (memory_path / "steps").read_text().splitlines()]
    assert rounds == sorted(rounds)


@pytest.mark.only_in_sweep
def test_a_node_that_comes_back_does_not_go_on_from_a_step_behind_which_another_had_gone(memory_path, undisturbed):
    with nodes_of_a_run(memory_path, replace(TWO, last_call=1.0)) as nodes:
        nodes.hold_after(9)
        stopped = nodes.start(0)
        nodes.wait(lambda seen: seen["step"] >= 9, "one node trains")
        stopped.process.send_signal(signal.SIGSTOP)
        nodes.hold_after(1)
        other = nodes.start(1)
        nodes.wait(lambda seen: seen["round"] > 0 and seen["step"] >= 2, "the other begins again, as it has nothing")
        other.process.kill()
        other.process.wait()
        stopped.process.send_signal(signal.SIGCONT)
        weights = nodes.finish(stopped)
    nodes.check_no_scar(weights, undisturbed)


@pytest.mark.only_in_sweep
def test_a_node_is_lost_while_it_waits_for_others(memory_path, undisturbed):
    with nodes_of_a_run(memory_path, TWO) as nodes:
        lost = nodes.start(0, nodes="2")
        wait_for_signs_of_life(nodes)
        lost.process.kill()
        lost.process.wait()
        weights = nodes.finish(*(nodes.start(slot, nodes="2") for slot in range(2)))
    nodes.check_no_scar(weights, undisturbed)


def test_a_node_gives_up_while_the_other_waits_for_its_workers(memory_path):
    with nodes_of_a_run(memory_path, TWO) as nodes:  # which end long before start_timeout
        both = [nodes.start(slot, nodes="2", can_connect=slot == 0, start_timeout=600.0) for slot in range(2)]
        assert [nodes.end(one) for one in both] == [1, 1], nodes.told()
        waited = both[0].log.read_text()
    assert "Another node has given up" in waited
    assert "A node has given up:" in waited
    assert "this node is not ready" in waited


def test_too_few_nodes_are_left(memory_path):
    with nodes_of_a_run(memory_path, TWO) as nodes:
        both = [nodes.start(slot, nodes="2", chaos="lose:node=1@step=9", start_timeout=20.0) for slot in range(2)]
        assert sorted(nodes.end(one) for one in both) == [-signal.SIGKILL, 1], nodes.told()
    assert "1 of at least 2 nodes connected to" in nodes.told(), nodes.told()


def test_a_node_that_gives_up_ends_the_run_for_all_and_says_why(memory_path):
    with nodes_of_a_run(memory_path, TWO) as nodes:
        both = [nodes.start(slot, chaos=", ".join(["raise:rank=1@step=5"] * 3)) for slot in range(2)]
        assert [nodes.end(one) for one in both] == [1, 1], nodes.told()
    told = [one.log.read_text() for one in both]
    assert all("The run failed 3 times in a row after step 4 with the same cause" in text for text in told), (
        nodes.told()
    )
    assert sum("A node has given up:" in text for text in told) == 1


def wait_for_signs_of_life(nodes):
    host, port = nodes.plan.rdzv.split(":")
    nodes.wait(lambda _: listens(host, int(port)), "the store is there")
    store = TCPStore(host, int(port), wait_for_workers=False, timeout=timedelta(seconds=60))
    nodes.wait(lambda _: store.add(LIFE, 0) >= 3, "the node waits for others")


def listens(host, port):
    try:
        socket.create_connection((host, port)).close()
    except ConnectionRefusedError:
        return False
    return True
