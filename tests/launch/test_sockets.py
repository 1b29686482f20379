"""The list of sockets in docs/security.md matches the kernel's, for each kind of run."""

import json
import sys
from pathlib import Path

import pytest
from ports import free_port
from two_nodes import run_together

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

PROGRAM = Path(__file__).with_name("socket_program.py")
PAGE = Path(__file__).parents[2] / "docs" / "security.md"


def listed(run):
    """Return who listens where in a kind of run, as the page has it."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text().splitlines() if "|" in line]
    named = [row[1:3] for row in rows if row[0] == run]
    assert named, f"the page has no run {run!r}"
    return {(who, address) for who, address in named if address}


def seen(*commands):
    """Return who listens where; rank 0 is named where it has a socket that the other ranks have not."""
    done = run_together(commands)
    assert [code for code, _ in done] == [0] * len(done), done
    lines = [line for _, output in done for line in output.splitlines() if line.startswith("[[") or line == "[]"]
    [sockets] = map(json.loads, lines)
    return [tuple(each) for each in sockets]


def kinds(sockets):
    return {("rank" if who.startswith("rank ") else who, address) for who, address in sockets}


def command(*words):
    return [sys.executable, str(PROGRAM), *words]


def test_one_process():
    assert seen((command("single", "1"), {})) == [] and listed("one process") == set()


@pytest.mark.parametrize(
    ("strategy", "run"),
    [
        ("ddp", "processes of one machine, started by fit"),
        ("ps", "parameter servers, one machine"),
        ("elastic", "elastic, one node"),
    ],
)
def test_processes_that_fit_starts(strategy, run):
    assert kinds(seen((command(strategy, "2"), {}))) == listed(run)


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_processes_that_a_launcher_starts(address):
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(free_port())}
    ranks = [(command("ddp", "2"), {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
    sockets = seen(*ranks)
    of_rank_0 = {("rank 0", address) for who, address in sockets if who == "rank 0"}
    assert kinds(sockets) | of_rank_0 == listed("processes of one machine, started by a launcher")


def test_nodes_of_an_elastic_run():
    """Here the address of the rendezvous, and with it that of the node, is loopback."""
    sockets = seen((command("elastic", "2", f"127.0.0.1:{free_port()}"), {}))
    names = {("store", "127.0.0.1"): "rdzv", ("rank", "127.0.0.1"): "node"}
    of_rank_0 = {("rank 0", "node") for who, _ in sockets if who == "rank 0"}
    found = {(who, names.get((who, address), address)) for who, address in kinds(sockets)} | of_rank_0
    assert found == listed("elastic, several nodes")
