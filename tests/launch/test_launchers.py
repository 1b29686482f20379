"""Real launches: each launcher starts processes, and they meet in one group."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from ports import free_port
from two_nodes import INTERFACE, absent, run_together, two_nodes

MEMBER = str(Path(__file__).with_name("member.py"))
PYTHON = sys.executable
ECHELON = [PYTHON, "-c", "import sys; from echelon.trainer.cli.main import main; sys.exit(main())"]
LOOPBACK = {"0100007F"}


def members(*commands):
    """Run what starts `MEMBER` and return what the processes of the run say, by rank."""
    done = run_together(commands)
    assert [code for code, _ in done] == [0] * len(done), "\n".join(output for _, output in done)
    lines = [line for _, output in done for line in output.splitlines() if line.startswith("{")]
    return sorted(map(json.loads, lines), key=lambda seen: seen["rank"])


def places(found):
    return [(seen["rank"], seen["local_rank"], seen["node_rank"], seen["total"]) for seen in found]


def test_torchrun():
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", MEMBER]
    found = members(([PYTHON, *words], {}))
    assert places(found) == [(0, 0, 0, 11.0), (1, 1, 0, 11.0)]
    assert {seen["launcher"] for seen in found} == {"torchrun"}


def test_echelon_launch_listens_on_loopback_only():
    found = members(([*ECHELON, "launch", "--nproc", "2", MEMBER], {}))
    assert places(found) == [(0, 0, 0, 11.0), (1, 1, 0, 11.0)]
    assert {address for seen in found for address in seen["listening"]} == LOOPBACK
    assert {seen["interface"] for seen in found} == {"lo"}


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_ranks_that_are_started_by_hand_on_one_machine_listen_on_loopback_only(address):
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(free_port())}
    found = members(*(([PYTHON, MEMBER], {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)))
    assert places(found) == [(0, 0, 0, 11.0), (1, 1, 0, 11.0)]
    assert {address for seen in found for address in seen["listening"]} == LOOPBACK


def test_mpirun():
    if shutil.which("mpirun") is None:
        absent("no `mpirun` on PATH; apt-get install openmpi-bin")
    words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", PYTHON, MEMBER]
    found = members((words, {}))
    assert places(found) == [(0, 0, 0, 11.0), (1, 1, 0, 11.0)]
    assert {seen["launcher"] for seen in found} == {"mpirun"}
    assert len({seen["main_port"] for seen in found}) == 1


def test_srun():
    port = free_port()

    def task(rank):
        return {
            "SLURM_JOB_ID": "4711",
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_NODEID": "0",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_TASKS_PER_NODE": "2",
            "SLURM_STEP_NODELIST": "node[7]",
            "MASTER_PORT": str(port),
        }

    found = members(*(([PYTHON, MEMBER], task(rank)) for rank in range(2)))
    assert places(found) == [(0, 0, 0, 11.0), (1, 1, 0, 11.0)]
    assert found[0]["line"] == f"2 processes, started by srun; store at 127.0.0.1:{port}"
    assert set(found[0]["listening"]) <= LOOPBACK


@pytest.fixture(scope="module")
def nodes():
    with two_nodes() as pair:
        yield pair


def test_echelon_launch_on_two_nodes(nodes):
    commands = []
    for rank, node in enumerate(nodes):
        options = ["--nproc", "1", "--nnodes", "2", "--node-rank", str(rank), "--rdzv", node.main_address]
        commands.append((node.command(*ECHELON, "launch", *options, MEMBER), {}))
    found = members(*commands)
    assert places(found) == [(0, 0, 0, 11.0), (1, 0, 1, 11.0)]
    assert {seen["interface"] for seen in found} == {INTERFACE}  # as this machine's name leads to loopback
    assert found[0]["listening"] == ["01004D0A"]
    assert found[0]["line"] == "2 processes on 2 nodes (1 each), started by torchrun; store at 10.77.0.1:29500"


def test_two_nodes_that_are_started_one_by_one_with_different_numbers_of_processes(nodes):
    commands = []
    for rank, node in enumerate(nodes):
        variables = {"MASTER_ADDR": node.main_address, "NODE_RANK": str(rank)}
        commands.append((node.command(PYTHON, MEMBER, "--launch", str(2 - rank)), variables))
    assert places(members(*commands)) == [(0, 0, 0, 111.0), (1, 1, 0, 111.0), (2, 0, 1, 111.0)]


def test_a_pod_for_each_process(nodes):
    def pod(rank):
        return {
            "KUBERNETES_PORT": "tcp://10.96.0.1:443",
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": nodes[0].address,
            "MASTER_PORT": "23456",
        }

    found = members(*((node.command(PYTHON, MEMBER), pod(rank)) for rank, node in enumerate(nodes)))
    assert places(found) == [(0, 0, 0, 11.0), (1, 0, 1, 11.0)]
    assert {seen["launcher"] for seen in found} == {"Kubeflow"}
