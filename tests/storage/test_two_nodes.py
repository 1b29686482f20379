"""Two nodes with folders of their own, which share nothing but a network and a store on it."""

import json
import sys
from pathlib import Path

import pytest
import torch
from server import environment, s3_server
from test_layouts import Net, fit
from two_nodes import run_together, two_nodes

from echelon import seed_everything

PROGRAM = Path(__file__).with_name("node_program.py")
PORT = 29533


@pytest.mark.slow
def test_fsdp_on_two_nodes_saves_to_a_bucket_and_resumes_there_to_the_bit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seed_everything(0)
    expected = fit("fsdp", 6, tmp_path / "local", module=Net())
    folders = [tmp_path / f"node{rank}" for rank in range(2)]
    for folder in folders:
        (folder / "tmp").mkdir(parents=True)

    def train(nodes, address, steps):
        commands = []
        for rank, (node, folder) in enumerate(zip(nodes, folders, strict=True)):
            numbers = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            numbers |= {"GROUP_RANK": rank, "GROUP_WORLD_SIZE": 2, "MASTER_PORT": PORT + steps}
            variables = {name: str(number) for name, number in numbers.items()}
            variables |= {"MASTER_ADDR": node.main_address, "TMPDIR": str(folder / "tmp"), **environment(address)}
            words = (sys.executable, str(PROGRAM), "s3://shared/runs", str(folder), str(steps))
            commands.append((node.command(*words), variables))
        done = run_together(commands, timeout=300)
        assert [code for code, _ in done] == [0, 0], "\n".join(output for _, output in done)
        return [json.loads(line) for _, output in done for line in output.splitlines() if line.startswith("{")]

    with two_nodes() as nodes, s3_server(nodes[0].address, "shared", lead=nodes[0].command()) as address:
        first = train(nodes, address, 4)
        for folder in folders:  # as if both machines were replaced
            assert not list(folder.rglob("*.ckpt"))
            (folder / "tmp").rename(folder / "lost")
            (folder / "tmp").mkdir()
        second = train(nodes, address, 6)
    assert [(seen["rank"], seen["nodes"], seen["step"]) for seen in first] == [(0, 2, 4), (1, 2, 4)]
    assert {seen["step"] for seen in second} == {6}
    assert {seen["dirpath"] for seen in first + second} == {first[0]["dirpath"]}
    assert first[0]["dirpath"].startswith("s3://shared/runs/")
    for folder in folders:
        weights = torch.load(folder / "weights.pt")
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
