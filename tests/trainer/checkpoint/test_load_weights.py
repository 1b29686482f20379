"""Weights are loaded from any format that is safe to read; mismatches are reported before anything is copied."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn

from echelon.common.errors import CheckpointError
from echelon.trainer.checkpoint import compare_weights, export, load_into, load_weights, save


def a_module(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


class Tied(nn.Module):
    """An embedding whose weight is also the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight


def assert_same(found: dict[str, Tensor], module: nn.Module) -> None:
    expected = module.state_dict()
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_weights_of_a_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", {"model": {**a_module().state_dict(), "0._extra_state": {"x": 1}}, "trainer": {}})
    assert_same(load_weights(tmp_path / "a.ckpt"), a_module())


def test_weights_of_a_safetensors_file(tmp_path: Path) -> None:
    save_file(a_module().state_dict(), tmp_path / "a.safetensors")
    assert_same(load_weights(tmp_path / "a.safetensors"), a_module())


def test_weights_of_a_hugging_face_folder_of_several_files(tmp_path: Path) -> None:
    state = a_module().state_dict()
    index: dict[str, str] = {}
    for number, names in enumerate((list(state)[:3], list(state)[3:])):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        save_file({name: state[name] for name in names}, tmp_path / file)
        index |= dict.fromkeys(names, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert_same(load_weights(tmp_path), a_module())


def test_an_index_that_leads_outside_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../x.safetensors"}}))
    with pytest.raises(CheckpointError, match="outside the folder"):
        load_weights(tmp_path)


@pytest.mark.parametrize("zipped", [True, False])
def test_weights_of_a_plain_torch_file(zipped: bool, tmp_path: Path) -> None:
    torch.save(a_module().state_dict(), tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    assert_same(load_weights(tmp_path / "a.pt"), a_module())


def test_weights_of_a_file_laid_out_as_lightnings(tmp_path: Path) -> None:
    module = nn.Linear(3, 4)
    others = {"epoch": 3, "pytorch-lightning_version": "2.6.6", "hyper_parameters": {"width": 4}}
    torch.save({"state_dict": module.state_dict(), **others}, tmp_path / "peer.ckpt")
    assert_same(load_weights(tmp_path / "peer.ckpt"), module)


@pytest.mark.filterwarnings("ignore")
def test_weights_of_a_checkpoint_that_lightning_wrote(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

    class Peer(lightning.LightningModule):
        def __init__(self, width: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Linear(3, width)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    module = Peer()
    settings = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(accelerator="cpu", **settings)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "peer.ckpt")
    assert_same(load_weights(tmp_path / "peer.ckpt"), module)


def test_names_are_chosen_by_patterns(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", {"model": a_module().state_dict()})
    assert set(load_weights(tmp_path / "a.ckpt", include="0.*")) == {"0.weight", "0.bias"}
    assert set(load_weights(tmp_path / "a.ckpt", include=["0.*", "2.*"], exclude="*.bias")) == {"0.weight", "2.weight"}
    with pytest.raises(CheckpointError, match=r"No weight of .* matches include='x.\*'.*it has 0.weight"):
        load_weights(tmp_path / "a.ckpt", include="x.*")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "holds a list, not a state dict"),
        ({"epoch": 3}, r"holds \['epoch'\], not tensors by name"),
        ({"state_dict": {"lr": 0.1}}, "not tensors by name"),
    ],
)
def test_a_torch_file_without_weights_is_refused(content: object, message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=message):
        load_weights(tmp_path / "a.pt")


def test_an_absent_file_and_a_foreign_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        load_weights(tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="contains no manifest.json, "):
        load_weights(tmp_path)


def test_loading_into_a_module_is_strict_and_tells_every_difference() -> None:
    module = a_module()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    weights = {**a_module(1).state_dict(), "head.weight": torch.ones(1), "0.weight": torch.ones(4, 5)}
    del weights["2.bias"]
    with pytest.raises(CheckpointError) as info:
        load_into(module, weights)
    message = str(info.value)
    assert "The weights do not fit Sequential" in message
    assert "missing (1):\n  2.bias" in message
    assert "unexpected (1):\n  head.weight" in message
    assert "0.weight: the module has (4, 3), the weights have (4, 5)" in message
    assert_same(before, module)


def test_loading_what_fits_returns_what_did_not() -> None:
    module, other = a_module(), a_module(1)
    weights = {**other.state_dict(), "extra": torch.ones(1), "0.weight": torch.ones(4, 5)}
    found = load_into(module, weights, strict=False)
    assert list(found.unexpected) == ["extra"]
    assert found.mismatched == [("0.weight", (4, 3), (4, 5))]
    assert torch.equal(module.state_dict()["2.weight"], other.state_dict()["2.weight"])
    assert torch.equal(module.state_dict()["0.weight"], a_module().state_dict()["0.weight"])


def test_a_long_list_of_differences_is_cut() -> None:
    found = compare_weights(nn.Linear(1, 1), {f"w{number}": torch.ones(1) for number in range(30)})
    assert "unexpected (30):" in str(found)
    assert "... and 20 more" in str(found)


def test_no_difference_is_false() -> None:
    assert not compare_weights(a_module(), a_module(1).state_dict())
    assert not load_into(a_module(), a_module(1).state_dict())


def test_one_of_two_tied_names_is_enough() -> None:
    module = Tied()
    weight = torch.randn(4, 3)
    assert not load_into(module, {"embedding.weight": weight})
    assert torch.equal(module.head.weight, weight)


def test_tied_weights_that_safetensors_saved_have_both_names(tmp_path: Path) -> None:
    module = Tied()
    save_model(module, str(tmp_path / "a.safetensors"))
    assert_same(load_weights(tmp_path / "a.safetensors"), module)


@pytest.mark.parametrize("destination", ["out", "out/mine.safetensors"])
def test_an_export_is_one_file_that_safetensors_reads(destination: str, tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", {"model": a_module().state_dict(), "optimizers": [torch.ones(3)]})
    for _ in range(2):
        file = export(tmp_path / "a.ckpt", tmp_path / destination)
    assert file.suffix == ".safetensors"
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert_same(load_file(file), a_module())


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "model.bin", "model.ckpt"])
def test_an_export_to_a_file_of_torch_is_told_how(name: str, tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", {"model": a_module().state_dict()})
    with pytest.raises(CheckpointError, match=rf"{name}.*torch.save\(echelon.load_weights"):
        export(tmp_path / "a.ckpt", tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def test_an_export_of_tied_weights_loads_with_the_safetensors_library(tmp_path: Path) -> None:
    module, other = Tied(), Tied()
    save(tmp_path / "a.ckpt", {"model": module.state_dict()})
    missing, unexpected = load_model(other, export(tmp_path / "a.ckpt", tmp_path))
    assert not missing
    assert not unexpected
    assert torch.equal(other.head.weight, module.head.weight)


def test_a_damaged_checkpoint_exports_nothing(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", {"model": a_module().state_dict()})
    (tmp_path / "a.ckpt" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="damaged"):
        export(tmp_path / "a.ckpt", tmp_path / "out")
    assert not (tmp_path / "out").exists()
