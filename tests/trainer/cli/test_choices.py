"""Choices of a command line: help about classes, all defaults, a file of predictions, the best of the last run."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from echelon import load_weights
from echelon.trainer.checkpoint.files import MappedFile
from echelon.trainer.checkpoint.safetensors_file import read_tensors
from echelon.trainer.cli.main import COMMANDS, main

PARTS = '''
"""Parts of the config."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from echelon import DataModule, TrainModule


class Net(TrainModule):
    """A line.

    Args:
        rate (float): of learning,
            in two lines of text.
        kind: what ``predict_step`` returns.
    """

    def __init__(self, width: int, rate: float = 0.1, kind: str = "dict", further: torch.nn.Module | None = None):
        super().__init__()
        self.layer, self.rate, self.kind = torch.nn.Linear(1, width), rate, kind

    def training_step(self, batch):
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch):
        self.log("val_loss", 1.0 + self.current_epoch)

    def predict_step(self, batch):
        if self.kind == "dict":
            return {"x": batch[0][:, 0], "out": [self.layer(batch[0])]}
        return self.layer(batch[0]) if self.kind == "tensor" else "text"

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.rate)


class Data(DataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(5.0).view(-1, 1)), batch_size=2)

    val_dataloader = predict_dataloader = train_dataloader
'''

CONFIG = """
seed: 1
trainer:
  max_epochs: 2
  enable_progress_bar: false
  enable_model_summary: false
  accelerator: cpu
  logger: {_target_: echelon.CSVLogger, save_dir: logs}
  callbacks: [{_target_: echelon.ModelCheckpoint, monitor: val_loss, save_top_k: 1, save_last: true}]
module: {_target_: choice_parts.Net, width: 2}
data: {_target_: choice_parts.Data}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "choice_parts.py").write_text(PARTS)
    (tmp_path / "run.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "choice_parts", raising=False)
    return tmp_path


def test_help_for_a_class_shows_its_arguments_and_their_docstrings(folder, capsys):
    assert main(["fit", "run.yaml", "--help-for", "module"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("choice_parts.Net\n  A line.\n\narguments:\n  width: int  (required)\n")
    assert "  rate: float = 0.1\n      of learning, in two lines of text.\n" in shown
    assert "  kind: str = 'dict'\n      what ``predict_step`` returns.\n" in shown
    assert main(["fit", "run.yaml", "--help-for", "trainer.callbacks.0"]) == 0
    shown = capsys.readouterr().out
    assert "  save_top_k: int = 1\n      " in shown and "monitor" in shown
    assert main(["fit", "run.yaml", "--help-for", "torch.optim.AdamW"]) == 0
    assert "weight_decay: float = 0.01\n      " in capsys.readouterr().out
    assert main(["fit", "run.yaml", "--help-for", "modul"]) == 2
    assert (
        "--help-for='modul' is neither a class nor a key that has one. Did you mean 'module'?"
        in capsys.readouterr().err
    )


def test_print_config_gives_every_default(folder, capsys):
    assert main(["fit", "run.yaml", "module.rate=0.5", "optimizer._target_=torch.optim.SGD", "--print-config"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    net = {"_target_": "choice_parts.Net", "width": 2, "rate": 0.5, "kind": "dict", "further": None}
    assert shown["module"] == net
    assert shown["trainer"]["callbacks"][0]["mode"] is None and shown["trainer"]["callbacks"][0]["save_last"] is True
    assert shown["optimizer"]["momentum"] == 0 and shown["trainer"]["precision"] == "32-true"


def tensors_of(path):
    return {name: block.tensor for name, block in read_tensors(MappedFile(path))[0].items()}


def predictions(path):
    """Return the names in a file of predictions and the rows of its samples."""
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return list(rows[0]), [[row["x"], *row["out.0"]] for row in rows]
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            names, *rows = csv.reader(file)
        return names, [[float(value) for value in row] for row in rows]
    content = tensors_of(path)
    return sorted(content), torch.cat([content["x"][:, None], content["out.0"]], dim=1).tolist()


def test_predict_writes_a_file_in_the_format_of_its_ending_and_takes_the_best_of_the_last_run(folder, capsys):
    assert main(["fit", "run.yaml"]) == 0
    assert main(["fit", "run.yaml", "module.rate=0.01"]) == 0
    (best,) = (folder / "logs").glob("**/version_1/checkpoints/epoch=0-*.ckpt")
    weights = load_weights(best)
    x = torch.arange(5.0)[:, None]
    expected = torch.cat([x, x @ weights["layer.weight"].T + weights["layer.bias"]], dim=1)
    for ending, names in {
        "jsonl": ["x", "out.0"],
        "csv": ["x", "out.0.0", "out.0.1"],
        "safetensors": ["out.0", "x"],
    }.items():
        assert main(["predict", "run.yaml", "ckpt_path=best", "--output", f"found.{ending}"]) == 0
        found, rows = predictions(Path(f"found.{ending}"))
        assert found == names
        torch.testing.assert_close(torch.tensor(rows), expected)
    assert main(["predict", "run.yaml", "module.kind=tensor", "--output", "one.safetensors"]) == 0
    assert list(tensors_of(Path("one.safetensors"))) == ["prediction"]
    assert not list(folder.glob(".*.partial"))
    capsys.readouterr()
    for words, message in (
        (["--output", "found.txt"], "must end with one of .jsonl, .csv, .safetensors, got '.txt'"),
        (["--output", "gone/found.csv"], "is in a folder that does not exist; create gone"),
        (["--output", "found.csv", "module.kind=text"], "must return tensors with a row for each sample"),
    ):
        assert main(["predict", "run.yaml", *words]) != 0
        assert message in capsys.readouterr().err
    (folder / "logs").rename(folder / "moved")
    assert main(["validate", "run.yaml", "ckpt_path=best"]) == 2
    assert "ckpt_path='best' needs a checkpoint of a ModelCheckpoint, got none in" in capsys.readouterr().err
    assert main(["validate", "run.yaml", "ckpt_path=best", "trainer.logger.save_dir=moved"]) == 0


COMPLETE = """
source echelon.bash
complete_words() {
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _echelon; echo "${COMPREPLY[@]}"
}
compopt() { :; }
complete_words echelon pre
complete_words echelon fit run.yaml trainer.max_
complete_words echelon predict run.yaml --ou
complete_words echelon fit run
complete_words echelon fit run.yaml ckpt_path=
"""


def test_bash_completes_commands_options_and_keys(folder, capsys):
    assert main(["completion", "bash"]) == 0
    (folder / "echelon.bash").write_text(capsys.readouterr().out)
    done = subprocess.run(["bash", "-c", COMPLETE], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    commands, settings, options, files, checkpoints = done.stdout.splitlines()
    assert commands == "predict" and options == "--output" and files == "run.yaml"
    limits = ("epochs", "steps", "time", "samples", "tokens")
    assert settings.split() == [f"trainer.max_{limit}=" for limit in limits]
    assert checkpoints.split() == ["ckpt_path=", "ckpt_path=last", "ckpt_path=best"]


def test_the_scripts_of_all_shells_name_every_command(capsys):
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        assert " ".join(COMMANDS) in capsys.readouterr().out
    assert main(["completion", "tcsh"]) == 2
    assert "no completion for 'tcsh'; choose one of bash, zsh, fish" in capsys.readouterr().err
