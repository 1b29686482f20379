"""Checkpoints in a store: complete or absent, read whole or by ranges, listed, linked and deleted."""

import secrets

import pytest
import torch

from echelon import load_weights
from echelon.common.errors import CheckpointError, EchelonError
from echelon.common.storage import as_path
from echelon.trainer import checkpoint
from echelon.trainer.checkpoint.in_store.store_folder import sweep_stored
from echelon.trainer.checkpoint.single_file import SingleFile


@pytest.fixture(params=["memory", "s3"])
def folder(request):
    if request.param == "memory":
        return as_path(f"memory://runs-{secrets.token_hex(4)}")
    return as_path(request.getfixturevalue("bucket")) / "runs"


def state(value=1.0):
    return {
        "model": {"weight": torch.full((300, 200), value), "bias": torch.arange(5.0)},
        "loop": {"global_step": 3, "names": ["a", "b"]},
    }


def test_a_state_is_saved_and_loaded_whole_and_by_ranges(folder):
    path = folder / "a.ckpt"
    checkpoint.save(path, state())
    assert checkpoint.verify(path).parameters == ["weight", "bias"]
    for lazy in ((), ["model"]):
        loaded = checkpoint.load(str(path), lazy=lazy)
        assert loaded["loop"] == state()["loop"]
        assert torch.equal(loaded["model"]["weight"].clone(), state()["model"]["weight"])
        assert torch.equal(loaded["model"]["bias"], torch.arange(5.0))
    assert torch.equal(load_weights(str(path), include="bias")["bias"], torch.arange(5.0))


def test_only_the_ranges_of_a_block_are_read(folder):
    from echelon.strategies.state.lazy_tensor import read_block

    whole = torch.randn(4000, 500)
    checkpoint.save(folder / "a.ckpt", {"model": {"weight": whole}})
    for offsets, sizes in (((1000, 0), (500, 500)), ((0, 100), (4000, 50)), ((3999, 499), (1, 1))):
        stored = checkpoint.load(folder / "a.ckpt", lazy=["model"])["model"]["weight"]
        block = read_block(stored, offsets, sizes)
        assert torch.equal(block, whole[offsets[0] :, offsets[1] :][: sizes[0], : sizes[1]])


def test_a_save_that_fails_leaves_no_checkpoint_and_the_older_one(folder):
    path = folder / "a.ckpt"
    checkpoint.save(path, state(1.0))
    with pytest.raises(CheckpointError):
        checkpoint.save(path, {**state(2.0), "bad": object()})
    assert checkpoint.load(path)["model"]["weight"][0, 0] == 1
    checkpoint.save(path, state(3.0))
    assert checkpoint.load(path)["model"]["weight"][0, 0] == 3
    assert len({place.parent for place in path.find()}) == 2  # the manifest, and the files of one save


def test_what_has_no_manifest_is_nobodys_checkpoint(folder):
    for name in ("a.ckpt", "b.ckpt"):
        checkpoint.save(folder / name, state())
    (folder / "b.ckpt/manifest.json").unlink()
    assert [found.path.name for found in checkpoint.list_checkpoints(folder)] == ["a.ckpt"]
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        checkpoint.resolve_checkpoint(folder / "b.ckpt")
    assert checkpoint.newest_valid(folder) == folder / "a.ckpt"
    sweep_stored(folder)
    assert not (folder / "b.ckpt").exists() and checkpoint.verify(folder / "a.ckpt")


def test_the_newest_is_known_from_manifests_and_is_not_removed(folder):
    origin = checkpoint.manifest.NO_RUN
    for name in ("z.ckpt", "a.ckpt"):
        origin = origin.after()
        checkpoint.save(folder / name, state(), origin=origin)
    assert checkpoint.newest_valid(str(folder)) == folder / "a.ckpt"
    assert not checkpoint.remove_checkpoint(folder / "a.ckpt") and checkpoint.remove_checkpoint(folder / "z.ckpt")
    assert {place.parts[-2] for place in folder.find()} >= {"a.ckpt"} and not (folder / "z.ckpt").exists()


def test_a_link_is_an_object_that_names_a_checkpoint(folder):
    for name in ("a.ckpt", "b.ckpt"):
        checkpoint.save(folder / name, state(ord(name[0])))
        checkpoint.point_link(folder / "last.ckpt", folder / name)
        assert checkpoint.load(folder / "last.ckpt")["model"]["weight"][0, 0] == ord(name[0])
    assert len(checkpoint.list_checkpoints(folder)) == 2
    assert checkpoint.resolve_checkpoint(folder / "last.ckpt") == folder / "last.ckpt"
    checkpoint.point_link(folder / "last.ckpt", folder / "a.ckpt")
    assert not checkpoint.remove_checkpoint(folder / "a.ckpt")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        checkpoint.point_link(folder / "last.ckpt", folder / "missing.ckpt")


def test_damage_is_found(folder):
    checkpoint.save(folder / "a.ckpt", state())
    place = next(one for one in (folder / "a.ckpt").find() if one.name == "model.safetensors")
    content = place.read_bytes()
    place.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"model.safetensors has the hash"):
        checkpoint.verify(folder / "a.ckpt")
    place.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=r"has \d+ bytes, not"):
        checkpoint.load(folder / "a.ckpt")
    place.unlink()
    with pytest.raises(CheckpointError, match="all|missing|damaged"):
        checkpoint.newest_valid(folder)


def test_damage_is_found_once_all_of_a_file_was_read_by_ranges(folder):
    checkpoint.save(folder / "a.ckpt", {"model": {name: torch.randn(200, 200) for name in "abcd"}})
    place = next(one for one in (folder / "a.ckpt").find() if one.name == "model.safetensors")
    content = place.read_bytes()
    place.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    stored = checkpoint.load(folder / "a.ckpt", lazy=["model"])["model"]
    stored["a"].clone()
    with pytest.raises(EchelonError, match="its content has changed"):
        [stored[name].clone() for name in "bcd"]


def test_a_checkpoint_may_be_one_object(folder):
    path = folder / "one.ckpt"
    checkpoint.save(path, state(), single_file=SingleFile())
    assert torch.equal(checkpoint.load(path)["model"]["weight"], state()["model"]["weight"])
    assert [found.path for found in checkpoint.list_checkpoints(folder)] == [path]
    assert set(load_weights(path)) == {"weight", "bias"}


def test_a_folder_replaces_one_object_and_the_other_way_round(bucket):
    folder = as_path(bucket)  # other stores have no folder with the name of an object
    path = folder / "a.ckpt"
    for value, form in ((1.0, SingleFile()), (2.0, None), (3.0, SingleFile())):
        checkpoint.save(path, state(value), single_file=form)
        assert checkpoint.load(path)["model"]["weight"][0, 0] == value
        assert len(checkpoint.list_checkpoints(folder)) == 1


def test_weights_are_exported_to_a_store_and_read_there(folder):
    checkpoint.save(folder / "a.ckpt", state())
    written = checkpoint.export(folder / "a.ckpt", folder / "exported")
    assert str(written) == f"{folder}/exported/model.safetensors"
    assert set(load_weights(str(folder / "exported"))) == set(load_weights(written)) == {"weight", "bias"}
