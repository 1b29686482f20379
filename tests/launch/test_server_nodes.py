"""Parameter servers on several nodes take the steps of one process, and listen only in a private network."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from server_nodes import fit
from two_nodes import run_together, two_nodes

PROGRAM = Path(__file__).with_name("server_nodes.py")


@pytest.fixture(scope="module")
def nodes():
    with two_nodes() as found:
        yield found


def run(nodes, servers, address, port):
    """Run one trainer on each node; return how each ended, and its output."""
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": address}
    command = [sys.executable, str(PROGRAM), servers]
    return run_together(
        [
            (node.command(*command), {**shared, "MASTER_PORT": port, "RANK": str(rank)})
            for rank, node in enumerate(nodes)
        ]
    )


@pytest.mark.only_in_sweep
@pytest.mark.parametrize(("servers", "places"), [("nodes", [0, 1]), ("2", [0, 0])])
def test_nodes_take_the_steps_of_one_process_and_listen_in_their_network_alone(nodes, servers, places):
    ended = run(nodes, servers, nodes[0].main_address, "29401")
    assert [code for code, _ in ended] == [0, 0], "\n".join(output for _, output in ended)
    [told] = [json.loads(line) for line in ended[0][1].splitlines() if line.startswith("{")]
    assert told["weights"] == pytest.approx(fit("single", 4), rel=0, abs=1e-12)
    for index, place in enumerate(places):
        assert told["listening"][f"server{index}"] == [nodes[place].address]
    for rank, node in enumerate(nodes):
        assert told["listening"][f"trainer{rank}"] == [node.address]


def test_a_public_address_is_refused(nodes):
    for node, address in zip(nodes, ("11.77.0.1", "11.77.0.2"), strict=True):
        words = ["ip", "-n", node.namespace, "address", "add", f"{address}/24", "dev", "node0"]
        subprocess.run(words, check=True, timeout=80)
    for code, output in run(nodes, "nodes", "11.77.0.1", "29402"):
        assert code == 1
        assert "MASTER_ADDR must be an address in a private network for parameter servers, got '11.77.0.1'" in output
