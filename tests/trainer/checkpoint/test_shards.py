"""Shards of DTensors: each rank writes its own, once for all replicas, and reads what it needs."""

from __future__ import annotations

import json
import math
import resource
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from echelon.common.errors import CheckpointError
from echelon.strategies.state.dtensor import shard_like
from echelon.strategies.state.lazy_tensor import Block, read_block
from echelon.testing import run_ranks
from echelon.trainer.checkpoint import AsyncWriter, SavingGroup, Writer, export, load, load_weights, save, verify
from echelon.trainer.checkpoint.files import MappedFile
from echelon.trainer.checkpoint.manifest import read_manifest
from echelon.trainer.checkpoint.safetensors_file import collect_tensors, read_tensors, write_tensors

SHAPES = {"even": (8, 3), "uneven": (7, 4), "few": (3, 5), "one": (1, 4), "none": (0, 4), "vector": (9,)}
WHOLE = {name: torch.arange(math.prod(shape)).view(shape).double() for name, shape in SHAPES.items()}
WHOLE["complex"] = torch.complex(WHOLE["uneven"], -WHOLE["uneven"])


def layouts() -> dict[str, tuple[Any, Any]]:
    """Return meshes of four ranks, and the placements of a tensor with this many dimensions on each."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    line = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    tiles = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    return {
        "rows": (line, lambda dim: (Shard(0),)),
        "columns": (line, lambda dim: (Shard(dim - 1),)),
        "replicas": (line, lambda dim: (Replicate(),)),
        "replicated rows": (square, lambda dim: (Replicate(), Shard(0))),
        "rows, turned": (square, lambda dim: (Shard(0), Replicate())),
        "tiles": (tiles, lambda dim: (Shard(0), Shard(dim - 1) if dim > 1 else Replicate())),
    }


def placed(mesh: Any, place: Any) -> dict[str, Tensor]:
    from torch.distributed.tensor import distribute_tensor

    return {name: distribute_tensor(tensor.clone(), mesh, place(tensor.dim())) for name, tensor in WHOLE.items()}


def write_and_read(folder: str) -> dict[str, int]:
    """Save in every layout, read each into every other; return the bytes of this rank's files by layout."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    found, sizes = layouts(), {}
    for title, layout in found.items():
        writer = AsyncWriter(SavingGroup(store, rank, 4))
        own = placed(*layout)
        tied = {**own, "tied": own["even"].detach(), "whole": torch.arange(4)}
        state = {"model": tied, "optimizers": [{"state": {name: {"m": value} for name, value in own.items()}}]}
        path = Path(folder) / f"{title}.ckpt"
        writer.save(path, state, still=("optimizers",))
        writer.wait_for_copy()
        for value in own.values():
            value.to_local().fill_(-1)
        writer.close()
        sizes[title] = sum(file.stat().st_size for file in path.glob(f"*-{rank + 1:05d}-of-*"))
    for path in Path(folder).glob("*.ckpt"):
        state = load(path, lazy=("model", "optimizers"))
        moments = {name: value["m"] for name, value in state["optimizers"][0]["state"].items()}
        for target, layout in found.items():
            for name, like in placed(*layout).items():
                for saved in (state["model"][name], moments[name]):
                    part = shard_like(saved, like)
                    assert part.placements == like.placements
                    assert torch.equal(part.to_local(), like.to_local()), f"{name} of {path.name} as {target}"
                    assert torch.equal(saved.clone(), WHOLE[name])
        assert torch.equal(state["model"]["tied"].clone(), WHOLE["even"])
    dist.barrier()
    dist.destroy_process_group()
    return sizes


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, int]]]:
    folder = tmp_path_factory.mktemp("written")
    return folder, run_ranks(write_and_read, 4, str(folder))


def test_every_layout_is_read_into_every_other(written: tuple[Path, list[dict[str, int]]]) -> None:
    for path in written[0].glob("*.ckpt"):
        verify(path)
        state = load(path)
        for name, whole in WHOLE.items():
            found = state["model"][name]
            assert type(found) is Tensor
            assert torch.equal(found, whole)
            assert torch.equal(load_weights(path)[name], whole)
        assert state["model"]["tied"] is state["model"]["even"]


def test_replicas_are_written_once_and_by_all(written: tuple[Path, list[dict[str, int]]]) -> None:
    folder, sizes = written
    for title in ("rows", "replicas", "replicated rows", "rows, turned", "tiles"):
        path = folder / f"{title}.ckpt"
        content = [load_file(file) for file in path.glob("model*.safetensors")]
        assert all(content)
        total = sum(tensor.numel() for file in content for tensor in file.values())
        assert total == sum(whole.numel() * (2 if whole.is_complex() else 1) for whole in WHOLE.values()) + 4
        assert all(size[title] for size in sizes)


def test_the_manifest_tells_the_mesh_of_the_tensors(written: tuple[Path, list[dict[str, int]]]) -> None:
    meshes = {path.stem: dict(read_manifest(path).mesh) for path in written[0].glob("*.ckpt")}
    assert meshes["rows"] == meshes["replicas"] == {"dp_shard": 4}
    assert meshes["replicated rows"] == {"dp_replicate": 2, "dp_shard": 2}
    assert meshes["tiles"] == {"dp_shard": 2, "tp": 2}


def test_the_plain_values_do_not_depend_on_the_layout(written: tuple[Path, list[dict[str, int]]]) -> None:
    texts = {(path / "state.json").read_text() for path in written[0].glob("*.ckpt")}
    assert len(texts) == 1
    assert json.loads(texts.pop())["model"]["tied"] == {"$tensor": "even"}


def test_an_export_of_shards_is_one_plain_file(written: tuple[Path, list[dict[str, int]]], tmp_path: Path) -> None:
    for path in written[0].glob("*.ckpt"):
        file = export(path, tmp_path / path.stem)
        found = load_file(file)
        for name, whole in WHOLE.items():
            if not whole.is_complex():
                assert torch.equal(found[name], whole)
        assert "tied" not in found
        assert torch.equal(load_weights(file)["tied"], WHOLE["even"])


def read_and_export_in_little_memory(path: Path, target: Path) -> Path:
    """Read blocks of a checkpoint of 128 MB, and export it, in 96 MB; mapped files that are only read do not count."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kilobytes = next(int(line.split()[1]) for line in lines if line.startswith("VmData"))
    limit = (kilobytes << 10) + (96 << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    state = load(path, lazy=["model"])["model"]
    blocks = [read_block(tensor, (700, 0), (128, 1024)) for tensor in state.values()]
    assert len(blocks) == 16
    for block in blocks:
        assert torch.equal(block[:, 0], torch.arange(700, 828).double())
    del state, blocks
    file = export(path, target)
    with pytest.raises((CheckpointError, RuntimeError), match="memory"):
        load(path)
    return file


def test_blocks_are_read_and_files_exported_in_less_memory_than_the_checkpoint_has(tmp_path: Path) -> None:
    row = torch.arange(1024).double()
    layers = {f"layer.{index}": row.repeat_interleave(1024).view(1024, 1024) for index in range(16)}
    save(tmp_path / "a.ckpt", {"model": layers})
    [file] = run_ranks(read_and_export_in_little_memory, 1, tmp_path / "a.ckpt", tmp_path)
    assert torch.equal(load_file(file)["layer.3"][:, 0], row)


def pieces_at(offsets: Iterable[Sequence[int]], shape: Sequence[int] = (2, 2)) -> list[Block]:
    return [Block(torch.zeros(*shape), tuple(offset)) for offset in offsets]


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param(pieces_at([(0, 0), (1, 0)]), id="overlap"),
        pytest.param(pieces_at([(0, 0), (0, 0), (4, 0)]), id="twice, and a gap"),
        pytest.param(pieces_at([(0, 0), (4, 0)]), id="gap"),
        pytest.param(pieces_at([(2, 0)]), id="without a beginning"),
        pytest.param(pieces_at([(0, 0), (0, 2), (2, 0)]), id="without a corner"),
        pytest.param(pieces_at([(0, 0), (1, 1), (2, 2), (0, 2)]), id="overlap in two directions"),
        pytest.param([*pieces_at([(0, 0)]), Block(torch.zeros(2, 2).int(), (2, 0))], id="two dtypes"),
    ],
)
@pytest.mark.parametrize("lazily", [False, True])
def test_blocks_that_make_up_no_tensor_are_refused(pieces: list[Block], lazily: bool) -> None:
    with pytest.raises(
        CheckpointError, match=r"shards of 'x' do not add up to its shape, found .*; use another checkpoint"
    ):
        collect_tensors({"x": pieces}, lazily=lazily)("x")


def test_shards_of_different_numbers_of_dimensions_are_refused() -> None:
    with pytest.raises(CheckpointError, match="do not add up to"):
        collect_tensors({"x": [*pieces_at([(0, 0)]), Block(torch.zeros(2), (2,))]})("x")


def test_empty_blocks_beside_others_count_nothing() -> None:
    pieces = [*pieces_at([(0, 0)]), Block(torch.zeros(0, 2), (9, 0)), Block(torch.ones(1, 2), (2, 0))]
    assert collect_tensors({"x": pieces}, lazily=True)("x").shape == (3, 2)
    assert collect_tensors({"x": pieces[:1] + pieces[2:]})("x")[2].tolist() == [1, 1]


def test_a_file_to_be_read_only_is_mapped_without_a_warning(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a.safetensors", {"x": Block.whole(torch.ones(3))})
    pieces, _ = read_tensors(MappedFile(tmp_path / "a.safetensors", is_private=False))
    assert pieces["x"].tensor.sum() == 3


def test_ranks_share_in_comparing_hashes(tmp_path: Path) -> None:
    Writer().save(tmp_path / "a.ckpt", {"model": {"x": torch.ones(3)}, "other": {"y": torch.ones(3)}})
    file = tmp_path / "a.ckpt" / "other.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    errors = []
    for rank in range(2):
        try:
            load(tmp_path / "a.ckpt", share=(rank, 2))
        except CheckpointError as error:
            errors.append(str(error))
    assert len(errors) == 1
    assert "other.safetensors has" in errors[0]
