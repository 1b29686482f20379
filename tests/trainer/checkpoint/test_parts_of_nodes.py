"""Nodes with folders of their own write one checkpoint: each its part, all of them or none."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from echelon.common.errors import CheckpointError
from echelon.strategies.snapshots.index import FileEntry
from echelon.strategies.snapshots.recovery import plan_transfers
from echelon.strategies.state.optimizer_state import Sharded
from echelon.trainer.checkpoint import (
    AsyncWriter,
    SavingGroup,
    Writer,
    check_complete,
    list_checkpoints,
    load,
    newest_valid,
    save,
    verify,
)
from echelon.trainer.checkpoint.atomic_folder import list_unfinished
from echelon.trainer.checkpoint.finding import resolve_checkpoint
from echelon.trainer.checkpoint.manifest import Origin, read_manifest
from echelon.trainer.checkpoint.on_nodes.gathering import FilesToRead
from echelon.trainer.checkpoint.single_file import SingleFile
from echelon.trainer.cli.main import main

NODES = [0, 0, 1, 1]
NAMES = [f"layer{index}" for index in range(8)]


def origin(step: int, lineage: str = "ab") -> Origin:
    return Origin(lineage, f"2026-01-01T00:00:{step:02d}.000000+00:00")


def state(step: int, rank: int) -> dict[str, Any]:
    own = {name: torch.full((4,), float(step + i)) for i, name in enumerate(NAMES) if i % len(NODES) == rank}
    return {
        "model": {name: torch.full((3, 2), float(step)) for name in NAMES},
        "optimizers": [{"state": Sharded(own)}],
        "loop": {"global_step": step},
    }


def on_nodes(
    folder: Path, work: Callable[[SavingGroup, Path], None], nodes: Sequence[int] = NODES, disks: Sequence[int] = ()
) -> list[CheckpointError | None]:
    """Call a function as every rank, in threads, with the folder of its node; return errors of checkpoints."""
    store = HashStore()

    def run(rank: int) -> CheckpointError | None:
        try:
            disk = (disks or nodes)[rank]
            work(SavingGroup(store, rank, len(nodes), timedelta(seconds=60), nodes=nodes), folder / f"disk{disk}")
        except CheckpointError as error:
            return error
        return None

    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(run, range(len(nodes))))


def saving(*steps: int, name: str = "{}.ckpt", lineage: str = "ab", **options: Any) -> Callable[..., None]:
    def work(ranks: SavingGroup, disk: Path) -> None:
        for step in steps:
            where = {"origin": origin(step, lineage), **options}
            Writer(ranks).save(disk / name.format(step), state(step, ranks.rank), **where)

    return work


def test_each_node_has_its_part_and_together_they_are_the_checkpoint(tmp_path: Path) -> None:
    assert on_nodes(tmp_path, saving(1)) == [None] * 4
    disks = [tmp_path / "disk0" / "1.ckpt", tmp_path / "disk1" / "1.ckpt"]
    files = [{file.name for file in disk.iterdir()} for disk in disks]
    assert files[0] & files[1] == {"manifest.json", "state.json"}
    assert files[1] - files[0] == {f"optimizers-0000{rank}-of-00004.safetensors" for rank in (3, 4)}
    assert (disks[0] / "manifest.json").read_bytes() == (disks[1] / "manifest.json").read_bytes()
    parts = read_manifest(disks[0]).nodes
    assert [list(part.ranks) for part in parts] == [[0, 1], [2, 3]]
    assert set(parts[1].needs) == (files[0] | files[1]) - {
        "manifest.json", "state.json", "optimizers-00002-of-00004.safetensors",
    }  # fmt: skip
    for disk in disks:
        check_complete(disk, takes_part=True)
        assert newest_valid(disk.parent, takes_parts=True) == disk
        for read in (verify, load, check_complete, lambda path: newest_valid(path.parent)):
            with pytest.raises(CheckpointError, match=r"part of some nodes of a run .* or copy them here"):
                read(disk)
    shutil.copytree(disks[1], disks[0], dirs_exist_ok=True)
    verify(disks[0])
    loaded = load(disks[0])
    assert loaded["loop"]["global_step"] == 1
    assert {name: value[0].item() for name, value in loaded["optimizers"][0]["state"].items()} == {
        name: 1.0 + index for index, name in enumerate(NAMES)
    }


@pytest.mark.parametrize("kind", [Writer, AsyncWriter])
def test_retention_of_rank_0_reaches_the_other_nodes(kind: Callable[[SavingGroup], Writer], tmp_path: Path) -> None:
    save(tmp_path / "disk1" / "other.ckpt", {"model": {}}, origin=origin(0, "cd"))

    def work(ranks: SavingGroup, disk: Path) -> None:
        writer = kind(ranks)
        for step in (1, 2, 3, 4):
            writer.save(disk / f"{step}.ckpt", state(step, ranks.rank), origin=origin(step))
            if step > 1 and ranks.rank == 0:
                writer.remove(disk / f"{step - 1}.ckpt", "ab")
        writer.close()

    assert on_nodes(tmp_path, work) == [None] * 4
    assert {path.name for path in (tmp_path / "disk0").iterdir()} == {"4.ckpt"}
    # one save later, since the nodes speak to each other only when they save
    assert {path.name for path in (tmp_path / "disk1").iterdir()} == {"3.ckpt", "4.ckpt", "other.ckpt"}


def test_nodes_that_see_the_folder_of_rank_0_write_there(tmp_path: Path) -> None:
    assert on_nodes(tmp_path, saving(1), disks=[0, 0, 0, 0]) == [None] * 4
    verify(tmp_path / "disk0" / "1.ckpt")
    assert not read_manifest(tmp_path / "disk0" / "1.ckpt").nodes


@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 1], [0, 0]])
def test_a_node_is_sent_what_its_ranks_read_in_the_same_layout_and_everything_in_another(
    nodes: list[int], tmp_path: Path
) -> None:
    on_nodes(tmp_path, saving(1))
    manifest = read_manifest(tmp_path / "disk0" / "1.ckpt")
    files = {
        name: FileEntry(file.size, "", None, 10 if name.endswith(".safetensors") else 0)
        for name, file in manifest.files.items()
    }
    needs = FilesToRead(files, manifest.nodes)
    second = 1 - nodes[0]
    holders = {name: [nodes[0] if name in manifest.nodes[0].files else second] for name in files}
    holders["state.json"] = [0, 1]
    if len(nodes) == 2:  # one node less: that of ranks 2 and 3 is gone, and somebody has copied its part
        holders = {name: [nodes[0]] for name in files}
    sent = {(nodes[one.target], one.name) for one in plan_transfers(needs, holders, nodes)}
    ours, theirs = "optimizers-00002-of-00004.safetensors", [f"optimizers-0000{n}-of-00004.safetensors" for n in (3, 4)]
    common = {(second, name) for name in ("model.safetensors", "optimizers-00001-of-00004.safetensors")}
    if nodes in ([0, 0, 1, 1], [1, 1, 0, 0]):
        expected = common | {(second, f"{ours}.outline")} | {(nodes[0], f"{name}.outline") for name in theirs}
    elif len(nodes) == 2:
        expected = set()
    else:
        expected = common | {(second, ours)} | {(nodes[0], name) for name in theirs}
    assert sent == expected


def test_commands_say_of_a_part_where_the_rest_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_nodes(tmp_path, saving(1))
    monkeypatch.chdir(tmp_path / "disk1")
    assert main(["ckpt", "ls", "."]) == 0
    assert capsys.readouterr().out.endswith("  1.ckpt (a part: 3 files on other nodes)\n")
    assert main(["ckpt", "show", "1.ckpt"]) == 0
    assert re.search(r"model.safetensors .* on node '.*' \(ranks 0 to 1\)\n", capsys.readouterr().out)
    assert main(["ckpt", "verify", "1.ckpt"]) == 1
    assert capsys.readouterr().out.startswith("part     1.ckpt: ")
    (tmp_path / "disk1" / "1.ckpt" / "optimizers-00003-of-00004.safetensors").write_bytes(b"damaged")
    assert main(["ckpt", "verify", "1.ckpt"]) == 1
    assert capsys.readouterr().out.startswith("damaged  1.ckpt: ")


def test_some_nodes_may_share_the_folder_of_rank_0(tmp_path: Path) -> None:
    assert on_nodes(tmp_path, saving(1), nodes=[0, 1, 2], disks=[0, 0, 2]) == [None] * 3
    shutil.copytree(tmp_path / "disk2" / "1.ckpt", tmp_path / "disk0" / "1.ckpt", dirs_exist_ok=True)
    verify(tmp_path / "disk0" / "1.ckpt")


def test_the_run_of_a_checkpoint_is_that_of_rank_0_and_replaces_its_own(tmp_path: Path) -> None:
    def work(ranks: SavingGroup, disk: Path) -> None:
        for step in (1, 2):  # each Engine has an id of its own, of which only rank 0's is saved
            Writer(ranks).save(disk / "a.ckpt", state(step, ranks.rank), origin=origin(step, f"a{ranks.rank}"))

    assert on_nodes(tmp_path, work) == [None] * 4
    for disk in tmp_path.iterdir():
        assert read_manifest(disk / "a.ckpt").saved_at == origin(2).saved_at
        assert [path.name for path in disk.iterdir()] == ["a.ckpt"]


def refused(tmp_path: Path, errors: Sequence[CheckpointError | None], text: str) -> None:
    assert all(isinstance(error, CheckpointError) for error in errors)
    assert any(text in str(error) for error in errors), errors
    for disk in tmp_path.iterdir():
        assert [one.path.name for one in list_checkpoints(disk)] == ["1.ckpt"]
        check_complete(disk / "1.ckpt", takes_part=True)
        assert list_unfinished(disk) == []


def test_one_file_is_refused(tmp_path: Path) -> None:
    on_nodes(tmp_path, saving(1))
    errors = on_nodes(tmp_path, saving(2, single_file=SingleFile()))
    refused(tmp_path, errors, "(ranks 2 to 3) share no folder; leave out single_file")


def test_a_checkpoint_of_another_run_on_another_node_is_not_overwritten(tmp_path: Path) -> None:
    on_nodes(tmp_path, saving(1))
    shutil.rmtree(tmp_path / "disk0")
    errors = on_nodes(tmp_path, saving(2, name="1.ckpt", lineage="cd"))
    assert "1.ckpt is a checkpoint of another run on a node that shares no folder" in str(errors[2])
    assert read_manifest(tmp_path / "disk1" / "1.ckpt").lineage == "ab"
    assert list_checkpoints(tmp_path / "disk0") == []


def test_nodes_that_share_a_folder_without_rank_0_are_refused(tmp_path: Path) -> None:
    nodes = [0, 1, 2]
    errors = on_nodes(tmp_path, saving(1), nodes=nodes, disks=[0, 1, 1])
    assert any("is shared by some nodes, but not with that of rank 0" in str(error) for error in errors)
    assert [list(disk.iterdir()) for disk in sorted(tmp_path.iterdir())] == [[], []]


def test_a_node_that_cannot_write_fails_the_save_everywhere(tmp_path: Path) -> None:
    on_nodes(tmp_path, saving(1))

    def work(ranks: SavingGroup, disk: Path) -> None:
        if ranks.rank == 2:
            (disk / "below").write_text("a file")
        Writer(ranks).save(disk / "below" / "2.ckpt", state(2, ranks.rank), origin=origin(2))

    errors = on_nodes(tmp_path, work)
    assert "could not be written" in str(errors[0])
    (tmp_path / "disk1" / "below").unlink()
    shutil.rmtree(tmp_path / "disk0" / "below")
    refused(tmp_path, errors, "(On rank 2 of 4.)")


def test_a_part_that_is_damaged_is_skipped(tmp_path: Path) -> None:
    on_nodes(tmp_path, saving(1, 2))
    disk = tmp_path / "disk1"
    (disk / "2.ckpt" / "optimizers-00003-of-00004.safetensors").unlink()
    with pytest.raises(CheckpointError, match="optimizers-00003-of-00004.safetensors is missing"):
        check_complete(disk / "2.ckpt", takes_part=True)
    assert newest_valid(disk, takes_parts=True) == disk / "1.ckpt"
    save(disk / "0.ckpt", {"model": {}}, origin=origin(0))
    assert newest_valid(disk) == disk / "0.ckpt"  # in one process, for which a part is none


def test_a_part_is_a_checkpoint_that_can_be_named(tmp_path: Path) -> None:
    on_nodes(tmp_path, saving(1))
    for disk in (tmp_path / "disk0", tmp_path / "disk1"):
        assert resolve_checkpoint(disk / "1.ckpt") == disk / "1.ckpt"


@pytest.mark.parametrize(
    "nodes", [[{"host": 1}], [{"host": "a", "ranks": [-1], "files": [], "needs": []}], {}, [7], "x",
              [{"host": "a", "ranks": [0], "files": ["../../x"], "needs": []}]],
)  # fmt: skip
def test_forged_parts_are_refused(nodes: object, tmp_path: Path) -> None:
    import hashlib

    on_nodes(tmp_path, saving(1))
    path = tmp_path / "disk0" / "1.ckpt" / "manifest.json"
    content = json.loads(path.read_bytes())
    del content["sha256"]
    head = json.dumps({**content, "nodes": nodes}, indent=1).encode().removesuffix(b"\n}")
    path.write_bytes(head + b',\n "sha256": "' + hashlib.sha256(head).hexdigest().encode() + b'"\n}\n')
    with pytest.raises(CheckpointError, match="nodes"):
        read_manifest(path.parent)
