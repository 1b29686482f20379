"""``echelon plan``: the table, the figure and the lines to paste; and what cannot be planned."""

import json
import textwrap

import pytest
import yaml

from echelon.trainer.cli.main import main

MODULE = """
import torch
from torch import nn
import echelon

class Blocks(echelon.TrainModule):
    def __init__(self, width=512, depth=4, reads=False):
        super().__init__()
        self.reads = reads
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)))

    def training_step(self, batch, batch_idx):
        loss = self.blocks(batch).square().mean()
        if self.reads and loss.item() > 1:
            loss = loss / 2
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.trainer.estimated_stepping_batches * 1e-3)

class Rows(echelon.DataModule):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(64, 512), 16)
"""
CONFIG = """
trainer: {max_epochs: 1, gradient_clip_val: 1.0}
module: {_target_: module_to_plan.Blocks, width: 512, depth: 4, reads: false}
data: {_target_: module_to_plan.Rows}
"""
PARAMETERS = 4 * (4 * (512 * 512 + 512))


@pytest.fixture(autouse=True)
def config(tmp_path, monkeypatch):
    (tmp_path / "module_to_plan.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "config.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def planned(capsys, *words):
    assert main(["plan", "config.yaml", "--json", *words]) in (0, 1)
    return json.loads(capsys.readouterr().out)


def test_layouts_that_fit_come_first_by_what_they_send(capsys, config):
    plan = planned(capsys, "--devices", "4", "--memory", "14MB", "--png", "bars.png")
    layouts = plan["layouts"]
    fitting = [layout["fits"] for layout in layouts]
    assert fitting == sorted(fitting, reverse=True)
    assert True in fitting
    assert False in fitting
    # pipelines, whose ranks wait for each other, come behind
    order = [(layout["idle"] > 0, round(sum(layout["traffic"].values()))) for layout in layouts if layout["fits"]]
    assert order == sorted(order)
    assert "pp 2 x fsdp 2" in {layout["layout"] for layout in layouts}
    by_name = {(layout["layout"], "activation_checkpointing" in layout["trainer"]): layout for layout in layouts}
    assert by_name["ddp", False]["parameters"] == by_name["ddp", False]["gradients"] == PARAMETERS
    assert by_name["ddp", False]["total"] > 4 * PARAMETERS > 14e6 * 0.9
    assert not by_name["ddp", False]["fits"]
    assert by_name["fsdp", False]["parameters"] == pytest.approx(PARAMETERS / 4)
    for layout in layouts:  # each with the global batch of 4 ranks that read the loader's batches
        given = layout["trainer"]["strategy"]
        readers = 4 if isinstance(given, str) else 4 // (given.get("tp", 1) * given.get("pp", 1))
        micro_batches = layout["trainer"].get("accumulate_grad_batches", 1)
        assert readers * layout["micro_batch"] * micro_batches == plan["global_batch_size"] == 64
    assert (config / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_printed_can_be_pasted(capsys, config):
    assert (
        main(["plan", "config.yaml", "--devices", "2", "--memory", "1GB", "--gpu", "H100", "--bandwidth", "10GB"]) == 0
    )
    printed = capsys.readouterr().out
    assert f"Blocks, {PARAMETERS / 4e6:.1f} M parameters: 2 devices of 1.00 GB, 32 samples a step" in printed
    lines = printed.partition("The first in a config:\n")[2].partition("Drawn as")[0]
    assert yaml.safe_load(lines) == {"trainer": {"strategy": "ddp"}}
    assert "Step" in printed
    assert (config / "plan.png").exists()


def test_nothing_fits_is_said_with_the_nearest(capsys):
    assert main(["plan", "config.yaml", "--devices", "2", "--memory", "1MB"]) == 1
    assert "Nothing fits: the nearest, " in capsys.readouterr().out


def test_a_module_that_needs_values_is_measured(capsys, config):
    words = ["--devices", "1", "--memory", "1GB", "module.reads=true"]
    assert main(["plan", "config.yaml", *words]) == 1
    error = capsys.readouterr().err
    assert "needs the values of a tensor at" in error
    assert "loss.item() > 1" in error
    assert "--measure" in error
    measured, imagined = planned(capsys, *words, "--measure"), planned(capsys, *words[:-1])
    [real, *_], [without, *_] = measured["layouts"], imagined["layouts"]
    for kind in ("parameters", "gradients", "optimizer", "activations"):
        assert real[kind] == pytest.approx(without[kind], rel=0.01)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--devices", "2", "--memory", "80"], 2, "--memory must be a number with a unit, got '80'"),
        (["--devices", "2"], 2, "--devices and --memory must be given together, got only --devices"),
        (["--devices", "0", "--memory", "1GB"], 2, "--devices must be >= 1, got 0"),
        (["--devices", "6", "--nodes", "4", "--memory", "1GB"], 2, "--nodes must divide --devices 6, got 4"),
        (["--devices", "2", "--memory", "1GB", "--gpu", "abacus"], 2, "--gpu must be a device whose peak is known"),
        (["--devices", "2", "--memory", "1GB", "data=null"], 1, "There is no training loader"),
        (["--devices", "7", "--memory", "1GB", "--global-batch-size", "8"], 2, "cannot share a global batch of 8"),
    ],
)
def test_what_cannot_be_planned_says_why(capsys, words, code, said):
    assert main(["plan", "config.yaml", *words]) == code
    assert said in capsys.readouterr().err
