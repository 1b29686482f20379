"""Snapshots in memory: the newest one that the nodes hold together is found, whichever node is lost or damaged."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from echelon.common.errors import CheckpointError, ProcessError
from echelon.strategies.snapshots.exchange import FileTransfer
from echelon.strategies.snapshots.index import INDEX, FileEntry, SnapshotIndex, read_index
from echelon.strategies.snapshots.recovery import plan_transfers
from echelon.strategies.snapshots.shared_file import MemoryFile, compute_checksum
from echelon.strategies.snapshots.snapshots import Contribution, MemorySnapshots
from echelon.strategies.state.lazy_tensor import OUTLINE
from echelon.testing import run_ranks

SIZE, HEAD = 300_000, 100


@dataclass
class World:
    """One of `world_size` ranks, as a process group shows them to snapshots."""

    rank: int
    world_size: int
    cpu_group: Any
    node_rank: int = 0
    device_group: Any = None


def join(world_size: int) -> World:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return World(dist.get_rank(), world_size, part(world_size))


@cache
def part(world_size: int) -> Any:
    return dist.group.WORLD if world_size == dist.get_world_size() else dist.new_group(list(range(world_size)))


def content(step: int, rank: int | None, size: int = SIZE) -> torch.Tensor:
    """Return what is in the file of a rank, or in the one that all nodes have, at a step."""
    generator = torch.Generator().manual_seed(100 * step + (99 if rank is None else rank))
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def take(snapshots: MemorySnapshots, step: int, *, error: str = "", odd: bool = False) -> None:
    """Take a snapshot of a file of each rank, one that all nodes have, and one that is rank 0's."""
    rank = snapshots.rank
    draft = snapshots.begin(step)
    files = {}
    for name, writer in [(f"own-{rank}", rank), ("common", None)]:
        if writer is None and not snapshots.is_first:
            continue
        file = snapshots.file(draft, name, SIZE)
        file.bytes.copy_(content(step, writer))
        if odd and writer is None and rank:
            file.bytes[7] += 1
        files[name] = FileEntry(SIZE, compute_checksum(file.bytes), writer, HEAD if writer is not None else 0)

    def describe(told: Sequence[Any]) -> Mapping[str, FileEntry]:
        text = f"step {step}: {told}".encode()
        (draft.path / "state").unlink(missing_ok=True)
        (draft.path / "state").write_bytes(text)
        return {"state": FileEntry(len(text), compute_checksum(text))}

    snapshots.commit(draft, Contribution(files, [rank], f"of rank {rank}", error), describe)


def step_of(path: Path, nodes: Sequence[int], node: int, saved: Sequence[int]) -> int:
    """Return the step of a snapshot after comparing all that this node has of it; it must have what its ranks read."""
    index = read_index(path)
    assert index is not None
    step = index.step
    assert torch.equal(MemoryFile(path / "common").bytes, content(step, None))
    assert (path / "state").read_text() == f"step {step}: {[f'of rank {rank}' for rank in range(len(saved))]}"
    alike = [saved.index(one) for one in saved] == [nodes.index(one) for one in nodes]
    for rank in range(len(saved)):
        file, outline = path / f"own-{rank}", path / f"own-{rank}{OUTLINE}"
        if file.exists():
            assert torch.equal(MemoryFile(file).bytes, content(step, rank)), f"{file.name} on node {node}"
        else:
            assert alike
            assert nodes[rank] != node
            assert torch.equal(MemoryFile(outline).bytes, content(step, rank, SIZE)[:HEAD])
    return step


def scenarios(
    base: str, saved: Sequence[int], cases: Mapping[str, tuple[Callable[[Path], None], Sequence[int]]]
) -> dict[str, int | None]:
    """Take three snapshots on nodes; then damage a copy in each way, and let ranks on other nodes agree."""
    world = join(len(saved))
    origin = Path(base) / "origin"
    snapshots = MemorySnapshots(origin / str(saved[world.rank]), 0, world, node=saved[world.rank])  # type: ignore[arg-type]
    assert snapshots.agree() is None
    for step in (10, 20, 30):
        take(snapshots, step)
    dist.barrier()
    found: dict[str, int | None] = {}
    for name, (damage, nodes) in cases.items():
        folder = Path(base) / name
        if world.rank == 0:
            shutil.copytree(origin, folder)
            damage(folder)
        part_of = join(len(nodes))
        dist.barrier()
        if world.rank < len(nodes):
            node = nodes[world.rank]
            later = MemorySnapshots(folder / str(node), 1, part_of, node=node)  # type: ignore[arg-type]
            recovered = later.agree()
            found[name] = None
            if recovered is not None:
                found[name] = recovered.step
                assert step_of(recovered.path, nodes, node, saved) == recovered.step
                assert [path.name for path in later.folder.iterdir()] == [recovered.path.name]
                assert later.agree() == recovered  # as the next round would, if this one dies at once
        dist.barrier()
        if world.rank == 0:
            shutil.rmtree(folder)
    dist.barrier()
    dist.destroy_process_group()
    return found


def lose(*nodes: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for node in nodes:
            shutil.rmtree(folder / str(node))

    return damage


def of_newest(folder: Path, node: int) -> Path:
    return folder / str(node) / "snapshots" / "0-0"  # the third of three is over the first


def flip(file: str, node: int, at: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = MemoryFile(of_newest(folder, node) / file).bytes
        content[at] = int(content[at]) ^ 16

    return damage


def both(*damages: Callable[[Path], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for one in damages:
            one(folder)

    return damage


def cut(file: str, node: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(of_newest(folder, node) / file, SIZE // 2)


def on_two_nodes(base: str) -> dict[str, int | None]:
    same = [0, 0, 1, 1]
    cases: dict[str, tuple[Callable[[Path], None], Sequence[int]]] = {
        "restarted": (lose(), same),
        "nodes in another order": (lose(), [1, 1, 0, 0]),
        "a node is lost": (lose(0), [1, 1]),
        "the other is lost": (lose(1), [0, 0]),
        "one is replaced": (lose(0), [7, 7, 1, 1]),
        "all are lost": (lose(0, 1), same),
        "three of four workers": (lose(), [0, 0, 1]),
        "one worker": (lose(1), [0]),
        # every file has a copy, so that damage of one does no harm
        "a flipped bit": (flip("own-1", 0, 1234), same),
        "in the common file": (flip("common", 1, SIZE - 1), same),
        "index of one node": (lambda folder: (of_newest(folder, 0) / INDEX).unlink(), same),
        "half a file": (cut("own-2", 1), same),
        # and damage of both does
        "both copies": (both(flip("own-1", 0, 0), flip("own-1", 1, SIZE - 1)), same),
        "both common": (both(flip("common", 0, 5), flip("common", 1, 5)), same),
        "both states": (both(flip("state", 0, 3), flip("state", 1, 3)), same),
        "a node and a bit": (both(lose(0), flip("own-1", 1, 77)), [1, 1]),
        "a node and half a file": (both(lose(1), cut("own-3", 0)), [0, 0]),
        "a node and the index": (both(lose(1), flip(INDEX, 0, 100)), [0, 0]),
    }
    return scenarios(base, same, cases)


def test_one_of_two_nodes_may_be_lost_or_damaged(memory_path: Path) -> None:
    results = run_ranks(on_two_nodes, 4, str(memory_path))
    found = results[0]
    assert all(one.items() <= found.items() for one in results)
    older = {"both copies", "both common", "both states", "a node and a bit"}
    older |= {"a node and half a file", "a node and the index"}
    assert {name for name, step in found.items() if step == 20} == older
    assert {name for name, step in found.items() if step is None} == {"all are lost"}
    assert {step for name, step in found.items() if name not in older | {"all are lost"}} == {30}


def on_three_nodes(base: str) -> dict[str, int | None]:
    same = [0, 1, 1, 2]
    cases: dict[str, tuple[Callable[[Path], None], Sequence[int]]] = {
        "restarted": (lose(), same),
        "0 is lost": (lose(0), [1, 2]),
        "1 is lost": (lose(1), [0, 2]),
        "2 is lost": (lose(2), [0, 1, 1]),
        "2 is replaced": (lose(2), [0, 1, 1, 5]),
        "two are lost": (lose(0, 1), [2]),
        "a flipped bit of a copy": (flip("own-2", 2, 9), same),
    }
    return scenarios(base, same, cases)


def test_one_of_three_nodes_may_be_lost_with_the_shards_of_its_ranks(memory_path: Path) -> None:
    found = run_ranks(on_three_nodes, 4, str(memory_path))[0]
    assert found.pop("two are lost") is None
    assert set(found.values()) == {30}


def on_one_node(base: str) -> tuple[list[Any], ...]:
    """Take 50 snapshots; then some in which one rank cannot write its part, or writes a different common file."""
    world = join(2)
    snapshots = MemorySnapshots(Path(base), 3, world)  # type: ignore[arg-type]
    sizes, files = [], []
    for step in range(1, 51):
        take(snapshots, step)
        dist.barrier()
        if step % 10 == 0:
            sizes.append(sum(file.stat().st_blocks for file in Path(base).rglob("*")))
            files.append(len(os.listdir("/proc/self/fd")))
        dist.barrier()
    for _ in range(2):  # neither takes the place of the one that is whole
        with pytest.raises(CheckpointError, match="see rank 1: no more paper"):
            take(snapshots, 60, error="no more paper" if world.rank else "")
    kept = read_index(snapshots.folder / "3-1")
    assert kept is not None
    dist.barrier()
    recovered = MemorySnapshots(Path(base), 4, world).agree()  # type: ignore[arg-type]
    assert recovered is not None
    later = MemorySnapshots(Path(base), 5, world)  # type: ignore[arg-type]
    slots = []
    for step in (51, 52):
        take(later, step)
        dist.barrier()
        slots.append(sorted(path.name for path in later.folder.iterdir()))
        dist.barrier()
    dist.destroy_process_group()
    return sizes, files, [kept.step, recovered.step], slots


def test_nothing_grows_and_a_snapshot_that_fails_replaces_none(memory_path: Path) -> None:
    for sizes, files, steps, slots in run_ranks(on_one_node, 2, str(memory_path)):
        assert len(set(sizes)) == 1
        assert len(set(files)) == 1
        assert steps == [50, 50]
        assert slots == [["5-0"], ["5-0", "5-1"]]


def with_odd_files(base: str, nodes: Sequence[int]) -> int:
    """Take snapshots in which each node's common file differs, and let the first node die."""
    world = join(3)
    node = nodes[world.rank]
    snapshots = MemorySnapshots(Path(base) / str(node), 0, world, node=node)  # type: ignore[arg-type]
    for step in (1, 2):
        take(snapshots, step, odd=True)
    dist.barrier()
    if world.rank == 0:
        shutil.rmtree(Path(base) / "0")
    dist.barrier()
    recovered = MemorySnapshots(Path(base) / str(node), 1, world, node=node).agree()  # type: ignore[arg-type]
    assert recovered is not None
    assert step_of(recovered.path, nodes, node, nodes) == 2
    dist.barrier()
    dist.destroy_process_group()
    return recovered.step


def test_what_rank_0_has_counts_where_nodes_differ(memory_path: Path) -> None:
    assert run_ranks(with_odd_files, 3, str(memory_path), [0, 1, 2]) == [2, 2, 2]


def test_one_process_needs_no_group(memory_path: Path) -> None:
    snapshots = MemorySnapshots(memory_path, 0)
    assert snapshots.agree() is None
    for step in (1, 2, 3):
        take(snapshots, step)
    recovered = MemorySnapshots(memory_path, 1).agree()
    assert recovered is not None
    assert step_of(recovered.path, [0], 0, [0]) == 3
    snapshots.clear()
    assert MemorySnapshots(memory_path, 2).agree() is None


def test_a_run_that_went_back_goes_on_from_its_later_snapshot(memory_path: Path) -> None:
    snapshots = MemorySnapshots(memory_path, 0)
    for step in (80, 100, 90):
        take(snapshots, step)
    recovered = MemorySnapshots(memory_path, 1).agree()
    assert recovered is not None
    assert recovered.step == 90


def test_a_snapshot_behind_which_a_later_round_has_gone_is_left_out(memory_path: Path) -> None:
    snapshots = MemorySnapshots(memory_path, 3)
    for step in (80, 90):
        take(snapshots, step)
    older = MemorySnapshots(memory_path, 6).agree([(2, 10), (4, 95), (5, 85)])
    assert older is not None
    assert older.step == 80
    assert MemorySnapshots(memory_path, 6).agree([(5, 0)]) is None


def test_a_snapshot_without_room_says_what_there_is(memory_path: Path) -> None:
    snapshots = MemorySnapshots(memory_path, 0)
    with pytest.raises(ProcessError, match="There is no room|cannot be used"):
        snapshots.file(snapshots.begin(1), "large", 1 << 60)


def test_every_flipped_bit_and_every_moved_page_changes_the_checksum() -> None:
    random.seed(1)
    for size in (0, 1, 8, 4096, 258_048, 258_049, 1_000_003):
        given = content(size, 0, size)
        first = compute_checksum(given)
        assert compute_checksum(given.clone()) == compute_checksum(bytes(given.tolist())) == first
        for at in {0, size // 2, size - 1, *(random.randrange(size) for _ in range(20))} if size else ():
            changed = given.clone()
            changed[at] = int(changed[at]) ^ (1 << random.randrange(8))
            assert compute_checksum(changed) != first
        for page in range(4096, size - 8192, 4096):
            for damage in (given[page - 4096 : page], torch.zeros(4096, dtype=torch.uint8)):
                changed = given.clone()
                changed[page : page + 4096] = damage
                assert compute_checksum(changed) != first
        assert compute_checksum(torch.cat([given, torch.zeros(1, dtype=torch.uint8)])) != first


def index_of(nodes: Sequence[int], sources: Sequence[Sequence[int]], files: Mapping[str, FileEntry]) -> SnapshotIndex:
    return SnapshotIndex(0, 1, "0-0", 5, nodes, sources, files)


def test_replicas_read_the_blocks_that_each_has_written() -> None:
    files = {f"own-{rank}": FileEntry(50, "", rank, 7) for rank in range(4)} | {"state": FileEntry(10, "")}
    index = index_of([0, 0, 1, 1], [[0, 2], [1, 3], [0, 2], [1, 3]], files)
    assert index.needed_by(9, [9, 9, 4, 4]) == set(files)
    index = index_of([0, 1, 2, 3], [[0, 2], [1, 3], [0, 2], [1, 3]], files)
    assert index.needed_by(0, [0, 1, 2, 3]) == {"state", "own-0", "own-2"}
    assert index.needed_by(0, [0, 0, 1, 1]) == set(files)


def test_a_node_gets_what_it_lacks_and_outlines_of_the_rest() -> None:
    files = {f"own-{rank}": FileEntry(50, "", rank, 7) for rank in range(3)} | {"state": FileEntry(10, "")}
    index = index_of([0, 1, 2], [[0], [1], [2]], files)
    holders = {"own-0": [0, 1], "own-1": [1], "own-2": [0], "state": [0, 1]}
    assert plan_transfers(index, holders, [0, 1, 8]) == [
        FileTransfer("own-1" + OUTLINE, 7, 1, 0),
        FileTransfer("own-2" + OUTLINE, 7, 0, 1),
        FileTransfer("own-0" + OUTLINE, 7, 0, 2),
        FileTransfer("own-1" + OUTLINE, 7, 1, 2),
        FileTransfer("own-2", 50, 0, 2),
        FileTransfer("state", 10, 1, 2),
    ]


def test_an_index_that_is_damaged_is_none(tmp_path: Path) -> None:
    assert read_index(tmp_path) is None
    text = index_of([0], [[0]], {"state": FileEntry(10, "x")}).to_bytes()
    (tmp_path / INDEX).write_bytes(text)
    found = read_index(tmp_path)
    assert found is not None
    assert found.files == {"state": FileEntry(10, "x")}
    for damaged in (b"", text[:-1], text.replace(b"10", b"11"), b"\xff" + text):
        (tmp_path / INDEX).write_bytes(damaged)
        assert read_index(tmp_path) is None
