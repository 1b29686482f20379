"""`echelon ckpt export --hf`: a checkpoint of any layout becomes a folder that from_pretrained reads bit by bit."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from as_rank import double_trainer
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon import FSDPStrategy, ParallelStrategy, TrainModule
from echelon.testing import run_ranks
from echelon.trainer.cli.main import main

sys.path.append(str(Path(__file__).parents[2] / "strategies" / "pretrained"))
from tiny_models import build, read, saved

pytest.importorskip("transformers")
LAYOUTS = {"fsdp": lambda: FSDPStrategy(deferred_init=True), "pp": lambda: ParallelStrategy(pp=2)}


class Finetuning(TrainModule):
    """Trains a folder's model."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.part = folder, None

    def configure_model(self):
        self.part = torch.nn.ModuleDict({"lm": echelon.load_pretrained(build("mixtral"), self.folder)})

    def training_step(self, batch, batch_idx):
        return self.part["lm"](input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def train(folder, path, strategy):
    module = Finetuning(folder)
    trainer = double_trainer(strategy=strategy, max_steps=2, global_batch_size=4)
    trainer.fit(module, DataLoader(TensorDataset(torch.arange(96).reshape(12, 8) % 24), 2))
    trainer.save_checkpoint(path)
    return trainer.strategy.full_model_state()


def train_all(folder, destination):
    torch.set_num_threads(1)
    return {name: train(folder, destination / f"{name}.ckpt", make()) for name, make in LAYOUTS.items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a folder with the base and the checkpoints, and the weights."""
    folder = tmp_path_factory.mktemp("export")
    base = saved("mixtral", folder)
    (base / "tokenizer.json").write_text("{}")
    weights = run_ranks(train_all, 2, base, folder, timeout=300)[0]
    return folder, weights | {"single": train(base, folder / "single.ckpt", "single")}


@pytest.mark.parametrize("layout", ["single", *LAYOUTS])
def test_a_checkpoint_becomes_a_folder(layout, trained, tmp_path, capsys):
    folder, weights = trained
    words = ["--hf", "--base", str(folder / "mixtral"), "--max-shard-size", "20KB"]
    assert main(["ckpt", "export", str(folder / f"{layout}.ckpt"), str(tmp_path / "out"), *words]) == 0
    assert "Wrote" in capsys.readouterr().out
    found = read("mixtral", tmp_path / "out", dtype=torch.float64).state_dict()
    for name, value in weights[layout].items():
        assert torch.equal(found[name.removeprefix("part.lm.")], value), name
    places = (tmp_path / "out", folder / "mixtral")
    index = [json.loads((place / "model.safetensors.index.json").read_text()) for place in places]
    assert index[0]["weight_map"].keys() == index[1]["weight_map"].keys()
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_in_another_dtype(trained, tmp_path):
    folder, _ = trained
    words = ["--hf", "--base", str(folder / "mixtral"), "--dtype", "bfloat16"]
    assert main(["ckpt", "export", str(folder / "single.ckpt"), str(tmp_path / "out"), *words]) == 0
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hf"], "--hf needs the config of the model.*give --base=DIR"),
        (["--dtype", "bfloat16"], "is for a folder; add --hf"),
        (["--hf", "--base", "BASE", "--partial"], "and all weights, got .* and --partial"),
        (["--hf", "--base", "/nowhere"], "There is no folder /nowhere"),
        (["--hf", "--base", "OTHER"], "is not of the model that .*it lacks"),
        (["--hf", "--base", "EMPTY"], "names no model of transformers"),
        (["--hf", "--base", "BASE", "--dtype", "int4"], "dtype must be a dtype"),
        (["--hf", "--base", "BASE", "--max-shard-size", "big"], "max_shard_size must be"),
    ],
)
def test_a_mistake_is_named_and_nothing_is_written(words, message, trained, tmp_path, capsys):
    folder, _ = trained
    places = {"BASE": folder / "mixtral", "OTHER": tmp_path / "gpt2", "EMPTY": tmp_path}
    if "OTHER" in words:
        saved("gpt2", tmp_path)
    words = [str(places.get(word, word)) for word in words]
    assert main(["ckpt", "export", str(folder / "single.ckpt"), str(tmp_path / "out"), *words]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
