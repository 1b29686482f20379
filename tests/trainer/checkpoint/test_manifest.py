"""Others can read the files: safetensors, torch's HuggingFace storage, plain JSON."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from echelon.common.errors import CheckpointError
from echelon.strategies.state.lazy_tensor import Block
from echelon.trainer.checkpoint import load, save
from echelon.trainer.checkpoint.files import MappedFile
from echelon.trainer.checkpoint.manifest import MANIFEST, read_manifest
from echelon.trainer.checkpoint.safetensors_file import read_tensors, write_tensors
from echelon.trainer.checkpoint.saving import STATE

ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def a_state() -> dict[str, Any]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    optimizer = {"state": {name: {"exp_avg": torch.randn_like(p)} for name, p in module.named_parameters()}, "lr": 0.1}
    return {"model": module.state_dict(), "optimizers": [optimizer], "trainer": {"global_step": 3}}


def test_safetensors_reads_the_model_by_its_plain_names(tmp_path: Path) -> None:
    state = a_state()
    save(tmp_path / "a.ckpt", state)
    module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    module.load_state_dict(load_file(tmp_path / "a.ckpt" / "model.safetensors"))
    assert str(module.state_dict()) == str(state["model"])


def test_safetensors_reads_every_other_tensor_under_its_place(tmp_path: Path) -> None:
    state = a_state()
    save(tmp_path / "a.ckpt", state)
    found = load_file(tmp_path / "a.ckpt" / "optimizers.safetensors")
    assert torch.equal(
        found["optimizers.0.state.0.weight.exp_avg"], state["optimizers"][0]["state"]["0.weight"]["exp_avg"]
    )


def test_the_header_says_pytorch_as_hugging_face_asks(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", a_state())
    with safe_open(tmp_path / "a.ckpt" / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"


def test_the_manifest_has_sizes_and_hashes_that_any_tool_computes(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", a_state(), mesh={"dp_shard": 1})
    manifest = json.loads((tmp_path / "a.ckpt" / MANIFEST).read_text())
    assert manifest["format_version"] == 1
    assert manifest["mesh"] == {"dp_shard": 1}
    assert set(manifest["parameters"]) == set(a_state()["model"])
    assert manifest["torch_version"] == torch.__version__
    for name, record in manifest["files"].items():
        content = (tmp_path / "a.ckpt" / name).read_bytes()
        assert len(content) == record["size"]
        assert hashlib.sha256(content).hexdigest() == record["sha256"]
    assert set(manifest["files"]) | {MANIFEST} == {path.name for path in (tmp_path / "a.ckpt").iterdir()}


@ALONE
def test_distributed_checkpoint_loads_the_tensors_of_all_parts(tmp_path: Path) -> None:
    state = a_state()
    save(tmp_path / "a.ckpt", state)
    wanted = {
        "0.weight": torch.zeros(5, 3),
        "1.num_batches_tracked": torch.ones((), dtype=torch.int64),
        "optimizers.0.state.0.weight.exp_avg": torch.zeros(5, 3),
    }
    state_dict_loader.load(wanted, storage_reader=HuggingFaceStorageReader(str(tmp_path / "a.ckpt")), no_dist=True)
    assert torch.equal(wanted["0.weight"], state["model"]["0.weight"])
    assert wanted["1.num_batches_tracked"] == 0
    assert torch.equal(
        wanted["optimizers.0.state.0.weight.exp_avg"],
        state["optimizers"][0]["state"]["0.weight"]["exp_avg"],
    )


@ALONE
def test_tensors_that_distributed_checkpoint_wrote_are_read(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5, dtype=torch.int32), "c": torch.randn(2).bfloat16()}
    writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    state_dict_saver.save(tensors, storage_writer=writer, no_dist=True)
    (file,) = tmp_path.glob("*.safetensors")
    found, _ = read_tensors(MappedFile(file))
    assert all(torch.equal(found[name].tensor, tensor) for name, tensor in tensors.items())


def sharded(folder: Path) -> torch.Tensor:
    """Turn the file of a saved model into two, each with half of the rows of `w`."""
    whole = torch.arange(35.0).reshape(7, 5)
    save(folder, {"model": {"w": whole, "b": torch.ones(2)}})
    manifest = read_manifest(folder)
    del manifest.files["model.safetensors"]
    (folder / "model.safetensors").unlink()
    shards = [
        {"w": Block(whole[:4], (0, 0)), "b": Block(torch.ones(2), (0,))},
        {"w": Block(whole[4:], (4, 0))},
    ]
    names = [f"model-0000{rank}-of-00002.safetensors" for rank in (1, 2)]
    for name, pieces in zip(names, shards, strict=True):
        manifest.files[name] = write_tensors(folder / name, pieces)
    manifest.parts["model"] = names
    (folder / MANIFEST).write_bytes(manifest.to_bytes())
    return whole


def test_shards_of_several_ranks_are_put_together(tmp_path: Path) -> None:
    whole = sharded(tmp_path / "a.ckpt")
    assert torch.equal(load(tmp_path / "a.ckpt")["model"]["w"], whole)


@ALONE
def test_distributed_checkpoint_loads_our_shards(tmp_path: Path) -> None:
    whole = sharded(tmp_path / "a.ckpt")
    wanted = {"w": torch.zeros(7, 5)}
    state_dict_loader.load(wanted, storage_reader=HuggingFaceStorageReader(str(tmp_path / "a.ckpt")), no_dist=True)
    assert torch.equal(wanted["w"], whole)


def test_shards_that_leave_a_gap_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "a.ckpt"
    sharded(folder)
    manifest = read_manifest(folder)
    manifest.parts["model"] = ["model-00002-of-00002.safetensors"]
    (folder / MANIFEST).write_bytes(manifest.to_bytes())
    with pytest.raises(CheckpointError, match="shards of 'w' do not add up to its shape"):
        load(folder)


def test_tied_weights_load_with_the_safetensors_library(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(4, 3)
            self.head = nn.Linear(3, 4, bias=False)
            self.head.weight = self.embedding.weight

    module, other = Tied(), Tied()
    save(tmp_path / "a.ckpt", {"model": module.state_dict()})
    missing, unexpected = load_model(other, tmp_path / "a.ckpt" / "model.safetensors")
    assert not missing
    assert not unexpected
    assert torch.equal(other.head.weight, module.head.weight)


def test_the_package_reads_and_writes_without_safetensors_and_distributed_checkpoint(tmp_path: Path) -> None:
    code = f"""
import sys, torch
sys.modules["safetensors"] = None
from echelon.trainer.checkpoint import load, save
save({str(tmp_path / "a.ckpt")!r}, {{"model": {{"w": torch.ones(2)}}}})
assert load({str(tmp_path / "a.ckpt")!r})["model"]["w"].sum() == 2
assert "torch.distributed.checkpoint" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=480)


def test_a_state_without_tensors_is_one_json_file(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", {"trainer": {"step": 1}})
    assert {path.name for path in (tmp_path / "a.ckpt").iterdir()} == {STATE, MANIFEST}
    assert load(tmp_path / "a.ckpt") == {"trainer": {"step": 1}}
