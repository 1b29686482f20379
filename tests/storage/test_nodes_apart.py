"""Two nodes that share no folder, with a local root: each keeps its part of the checkpoints on its own disk."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest
import torch
from test_layouts import Net, fit
from two_nodes import absent, run_together, start

from echelon import seed_everything
from echelon.trainer.checkpoint import list_checkpoints, load, verify

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("node_program.py")
OWN_DISK = ("unshare", "--mount", "mount", "--bind")


class Nodes:
    """Two nodes whose root is the same path, and another disk on each: mount namespaces of this machine."""

    def __init__(self, folder):
        self.root = folder / "runs"
        self.disks = [folder / f"disk{node}" for node in range(2)]
        self.outs = [folder / f"out{node}" for node in range(2)]
        for place in (self.root, *self.disks, *self.outs):
            place.mkdir()
        words = (*OWN_DISK, self.disks[0], self.root)
        tried = subprocess.run(words, capture_output=True, text=True, timeout=80, check=False)
        if tried.returncode:
            absent(f"no mount namespaces here, which need root: {tried.stderr.strip()}")

    def commands(self, port, steps, strategy, per_node=1, order=(0, 1), ckpt_path="last"):
        """Return the command and the variables of each rank; `order` has the nodes as the launcher numbers them."""
        for rank in range(2 * per_node):
            place = rank // per_node
            numbers = {"RANK": rank, "WORLD_SIZE": 2 * per_node, "LOCAL_RANK": rank % per_node}
            numbers |= {"LOCAL_WORLD_SIZE": per_node, "GROUP_RANK": place, "GROUP_WORLD_SIZE": 2, "MASTER_PORT": port}
            variables = {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}
            variables["OWN_DISK"] = str(self.disks[order[place]])
            out = self.outs[order[place]]
            words = (sys.executable, str(PROGRAM), str(self.root), str(out), str(steps), strategy, str(per_node))
            yield [*words, ckpt_path], variables

    def train(self, port, steps, strategy="fsdp", **how):
        """Return the exit code and the output of each rank."""
        return run_together(list(self.commands(port, steps, strategy, **how)), timeout=300)

    def good(self, *arguments, **how):
        """Train, and return what the ranks print."""
        done = self.train(*arguments, **how)
        assert [code for code, _ in done] == [0] * len(done), "\n".join(output for _, output in done)
        return [json.loads(line) for _, output in done for line in output.splitlines() if line.startswith("{")]

    def checkpoints(self, node):
        """Return the checkpoints on the disk of a node."""
        return [one.path for folder in self.disks[node].rglob("checkpoints") for one in list_checkpoints(folder)]


@pytest.fixture
def nodes(tmp_path):
    return Nodes(tmp_path)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Return the weights after six steps on nodes that share all, by strategy."""
    known = {}

    def weights(strategy):
        if strategy not in known:
            seed_everything(0)
            known[strategy] = fit(strategy, 6, tmp_path_factory.mktemp(strategy), module=Net())
        return known[strategy]

    return weights


def equal(nodes, weights):
    for out in nodes.outs:
        own = torch.load(out / "weights.pt")
        assert all(torch.equal(own[name], weights[name]) for name in weights)


@pytest.mark.parametrize(("strategy", "port"), [("fsdp", 29541), ("ddp", 29546)])
def test_a_run_resumes_to_the_bit_whichever_node_is_first(strategy, port, nodes, expected, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert {seen["step"] for seen in nodes.good(port, 4, strategy)} == {4}
    last = nodes.checkpoints(0)[-1]
    if strategy == "fsdp":
        shutil.copytree(nodes.checkpoints(1)[-1], tmp_path / "whole.ckpt")
        shutil.copytree(last, tmp_path / "whole.ckpt", dirs_exist_ok=True)
        verify(tmp_path / "whole.ckpt")
        assert load(tmp_path / "whole.ckpt")["loop"]["global_step"] == 4
    else:
        assert nodes.checkpoints(1) == []
        verify(last)
    second = nodes.good(port + 1, 6, strategy, order=(1, 0))
    assert {seen["step"] for seen in second} == {6}
    assert {seen["dirpath"] for seen in second} == {str(nodes.root / "echelon_logs" / "version_0" / "checkpoints")}
    equal(nodes, expected(strategy))
    assert list(nodes.root.iterdir()) == []  # only the nodes have written there
    for disk in nodes.disks:
        assert not list(disk.rglob(".*.ckpt.*")), "something is left of what was received"


def test_a_part_that_is_gone_is_named_and_an_earlier_checkpoint_is_used_if_all_have_it(
    nodes, expected, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    nodes.good(29551, 4)
    for node in range(2):
        assert [path.name for path in nodes.checkpoints(node)] == ["epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"]
    newest = nodes.root / nodes.checkpoints(0)[-1].relative_to(nodes.disks[0])
    earlier = nodes.checkpoints(1)[0]
    shutil.copytree(earlier, tmp_path / "earlier")
    shutil.rmtree(nodes.disks[1])  # a machine that was replaced
    nodes.disks[1].mkdir()
    for port, ckpt_path in ((29552, "last"), (29553, str(newest))):
        done = nodes.train(port, 6, ckpt_path=ckpt_path)
        assert [code for code, _ in done] == [1, 1]
        for _, output in done:
            assert f"{newest} is not complete: no node of this run has model-00002-of-00002.safetensors" in output
            assert "(rank 1) had written. Start the run on the nodes that have them, copy the folder" in output
    shutil.copytree(tmp_path / "earlier", earlier)
    done = nodes.train(29554, 6, "ddp")  # for which other nodes' parts are read whole
    assert [code for code, _ in done] == [0, 0], done
    assert f"Skipped the checkpoint {newest}: no node of this run has model-00002-of-00002.safetensors" in done[0][1]
    for out in nodes.outs:
        torch.testing.assert_close(torch.load(out / "weights.pt"), expected("fsdp"), atol=1e-6, rtol=1e-5)


def test_a_kill_of_either_node_loses_no_checkpoint(nodes, expected, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for victim in range(2):
        killed_in_training(nodes, 29561 + victim, victim, after=Random(victim).uniform(0, 0.3))
        assert nodes.checkpoints(0)
    assert {seen["step"] for seen in nodes.good(29565, 6)} == {6}
    equal(nodes, expected("fsdp"))


def killed_in_training(nodes, port, victim, after):
    """Train; some seconds after there is a checkpoint, kill a node and then the other, as a launcher does."""
    commands = nodes.commands(port, 6, "fsdp")
    running = [start(command, variables, nodes.outs[0] / "killed.txt") for command, variables in commands]
    end = time.monotonic() + 100
    while not nodes.checkpoints(0) and all(one.poll() is None for one in running) and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(after)
    for one in (running[victim], running[1 - victim]):
        one.kill()
        one.wait(30)
