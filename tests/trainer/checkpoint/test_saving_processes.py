"""Processes that train together save together: alongside their collectives, through any failure of one."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from echelon.common.errors import CheckpointError
from echelon.strategies.cluster.launchers import detect_environment
from echelon.strategies.distributed.process_group import ProcessGroup
from echelon.strategies.state.optimizer_state import Sharded
from echelon.testing import run_ranks
from echelon.trainer.checkpoint import load, make_writer
from echelon.trainer.checkpoint.files import MappedFile
from echelon.trainer.checkpoint.manifest import read_manifest
from echelon.trainer.checkpoint.safetensors_file import read_tensors


def dealt(step: int, rank: int) -> dict[str, Any]:
    own = {f"p{index}": {"exp_avg": torch.full((50_000,), float(step))} for index in range(rank, 6, 3)}
    return {
        "model": {"w": torch.full((10,), float(step))},
        "optimizers": [{"state": Sharded(own), "param_groups": []}],
        "loop": {"global_step": step},
    }


def save_while_reducing(folder: str) -> dict[str, Any]:
    """Save again and again while the default group is in use; then with a full disk on rank 1; then without."""
    group = ProcessGroup(detect_environment(), torch.device("cpu"))
    group.join()
    rank, path = group.rank, Path(folder)
    writer = make_writer(group, is_async=True)
    total = torch.zeros(1000)
    for step in range(1, 6):
        writer.save(path / f"{step}.ckpt", dealt(step, rank))
        for _ in range(20):
            total.fill_(1.0)
            dist.all_reduce(total)
    writer.close()
    is_committed = (path / "5.ckpt").is_dir()

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    writer.save(path / "6.ckpt", dealt(6, rank))
    error = ""
    try:
        writer.close()
    except CheckpointError as raised:
        error = str(raised)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer.save(path / "7.ckpt", dealt(7, rank))
    writer.close()
    return {"is_committed": is_committed, "error": error, "total": total[0].item()}


def test_ranks_save_beside_their_collectives_and_hear_of_a_full_disk(tmp_path: Path) -> None:
    results = run_ranks(save_while_reducing, 3, str(tmp_path))
    for rank, result in enumerate(results):
        assert result["is_committed"]
        assert result["total"] == 3
        assert "6.ckpt could not be written: File too large (EFBIG)" in result["error"]
        assert ("(On rank 1 of 3.)" in result["error"]) == (rank != 1)
    assert {path.name for path in tmp_path.iterdir()} == {f"{step}.ckpt" for step in (1, 2, 3, 4, 5, 7)}
    for step in (1, 2, 3, 4, 5, 7):
        loaded = load(tmp_path / f"{step}.ckpt")
        assert {name: value["exp_avg"].sum() for name, value in loaded["optimizers"][0]["state"].items()} == {
            f"p{index}": step * 50_000 for index in range(6)
        }


def sharded(rows: int, step: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(step)
    return {"weight": torch.randn(rows, 3), "bias": torch.randn(rows), "scale": torch.randn(())}


def save_dtensors(folder: str) -> None:
    """Save DTensors: rows over four ranks; and over two, replicated over two."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    group = ProcessGroup(detect_environment(), torch.device("cpu"))
    group.join()
    flat = init_device_mesh("cpu", (4,))
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    layouts: dict[str, Any] = {"flat": (flat, [Shard(0)]), "hybrid": (hybrid, [Replicate(), Shard(0)])}
    writer = make_writer(group, is_async=True)
    for name, (mesh, placements) in layouts.items():
        for rows in (7, 2):
            model: dict[str, Any] = sharded(rows)
            for key in ("weight", "bias"):
                model[key] = distribute_tensor(model[key], mesh, placements)
            model["tied"] = model["weight"]
            writer.save(Path(folder) / f"{name}-{rows}.ckpt", {"model": model}, mesh={"dp_shard": 4})
    writer.close()


def test_shards_of_dtensors_are_written_once_and_load_as_whole_tensors(tmp_path: Path) -> None:
    run_ranks(save_dtensors, 4, str(tmp_path))
    for rows in (7, 2):
        expected = sharded(rows)
        for name in ("flat", "hybrid"):
            path = tmp_path / f"{name}-{rows}.ckpt"
            loaded = load(path)["model"]
            for key in ("weight", "bias", "scale"):
                assert torch.equal(loaded[key], expected[key])
            assert loaded["tied"] is loaded["weight"]
            pieces = [read_tensors(MappedFile(file))[0].values() for file in path.glob("*.safetensors")]
            written = sum(piece.tensor.numel() for pieces_of_file in pieces for piece in pieces_of_file)
            assert written == sum(tensor.numel() for tensor in expected.values())
            assert list(read_manifest(path).parameters) == ["weight", "bias", "scale"]
