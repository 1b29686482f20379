"""`echelon port`: Lightning programs rewritten, run and annotated; the table of departures beside docs/lightning.md."""

import ast
import inspect
import re
from pathlib import Path

import pytest
from programs import run_program

import echelon
from echelon.lightning.departures import BY_NAME, DEPARTURES, UNSEEN
from echelon.lightning.names import PUBLIC_AT_ROOT, RENAMED, WITHOUT_COUNTERPART, find_replacement, has_counterpart
from echelon.lightning.port import port_program
from echelon.trainer.cli.main import main

ROOT = Path(__file__).parents[2]

PROGRAM = '''\
#!/usr/bin/env python
"""A program that runs with Lightning."""

import os, sys
import lightning as L  # the framework
import lightning.pytorch as pl
import pytorch_lightning
import torch
from lightning.pytorch import LightningModule, callbacks
from lightning.pytorch.callbacks import (
    EarlyStopping,  # ends it
    ModelCheckpoint as Saver,
)
from lightning.pytorch.callbacks import ProgressBar, Timer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch.utils.data import DataLoader, TensorDataset


class Größe(LightningModule):  # ü
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx) -> STEP_OUTPUT:
        loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("größe", loss); assert isinstance(self, pl.LightningModule)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), 2)


if __name__ == "__main__":
    pytorch_lightning.seed_everything(0)
    trainer = pl.Trainer(
        max_epochs=2,   # two
        replace_sampler_ddp=True,
        callbacks=[pl.callbacks.EarlyStopping("größe"), Saver(save_last=True), callbacks.ModelSummary(), Timer()],
        logger=pl.loggers.CSVLogger("lightning_logs"), enable_progress_bar=False,
    )
    trainer.fit(Größe(), datamodule=Data())
    assert isinstance(trainer.logger, CSVLogger) and EarlyStopping is L.pytorch.callbacks.EarlyStopping
    assert issubclass(pl.callbacks.progress.ProgressBar, ProgressBar)
    print(trainer.global_step, L.pytorch.utilities.rank_zero_only.__name__, file=sys.stdout)
'''


def notes_of(source):
    return [(note.line, note.kind, note.text.partition(": ")[0]) for note in port_program(source).notes]


def test_a_ported_program_runs_and_keeps_its_comments_and_layout(tmp_path):
    ported = port_program(PROGRAM)
    for line in (
        "import echelon as L  # the framework",
        "import echelon as pl",
        "import echelon",
        "from echelon import (\n    EarlyStopping,  # ends it\n    ModelCheckpoint as Saver,\n)",
        "from echelon.lightning import STEP_OUTPUT",
        "class Größe(TrainModule):  # ü",
        "class Data(L.DataModule):",
        "isinstance(self, pl.TrainModule)",
        "        max_epochs=2,   # two\n        use_distributed_sampler=True,",
        "pl.lightning.ProgressBar",
    ):
        assert line in ported.source
    (tmp_path / "program.py").write_text(ported.source)
    done = run_program("program.py", folder=tmp_path)
    assert done.stdout.split()[-2:] == ["8", "rank_zero_only"], done.stderr


def test_what_departs_is_said_line_by_line():
    assert notes_of(PROGRAM) == [
        (44, "departs", "ModelCheckpoint(save_last=)"),
        (44, "departs", "Timer"),
        (45, "departs", "'lightning_logs'"),
    ]


@pytest.mark.parametrize(
    ("line", "kind", "said"),
    [
        ("pl.Trainer(gpus=2)", "no counterpart", "use accelerator='gpu' and devices="),
        ("pl.Trainer(plugins=[1])", "no counterpart", "leave plugins out"),
        ("pl.Trainer(accumulate_grad_batches={0: 2})", "departs", "GradientAccumulationScheduler"),
        ("pl.Trainer({})", "departs", "keyword arguments only"),
        ("pl.profilers.XLAProfiler()", "no counterpart", "XLAProfiler: use SimpleProfiler"),
        ("pl.callbacks.ModelCheckpoint(enable_version_counter=False)", "no counterpart", "never reused"),
        ("pl.nothing()", "no counterpart", "nothing: Echelon has nothing like it"),
        ("trainer.fit_loop.epoch_loop", "no counterpart", "trainer.model"),
        ("torch.load('a.ckpt')", "no counterpart", "echelon.load_weights"),
        ("open('lightning_logs/version_0')", "departs", "echelon_logs"),
        ("class A:\n    def training_epoch_end(self, outputs): pass", "no counterpart", "write on_train_epoch_end"),
        ("class A:\n    def on_save_checkpoint(self, checkpoint): pass", "departs", "safetensors"),
    ],
)
def test_each_departure_is_found_where_a_program_shows_it(line, kind, said):
    ported = port_program(f"import lightning.pytorch as pl\n{line}\n")
    ast.parse(ported.source)
    assert [note for note in ported.notes if note.kind == kind and said in note.text]


@pytest.mark.parametrize(
    "line",
    [
        "pl.Trainer(accumulate_grad_batches=2, min_epochs=None, plugins=None)",
        "pl.callbacks.ModelCheckpoint(save_last=False)",
        "torch.save(weights, 'weights.pt')",
        "self.log('loss', loss, sync_dist=True)",
        "def training_epoch_end(outputs): pass",
    ],
)
def test_what_behaves_alike_is_passed_over(line):
    assert port_program(f"import lightning.pytorch as pl\n{line}\n").notes == ()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import lightning.pytorch.callbacks as cb\ncb.Timer", "import echelon as cb\ncb.Timer"),
        ("import lightning.pytorch\nlightning.pytorch.Trainer", "import echelon\nechelon.Trainer"),
        ("from lightning import pytorch as pl\npl.Callback", "import echelon as pl\npl.Callback"),
        ("from lightning.pytorch import *\nLightningModule", "from echelon import *\nTrainModule"),
        ("from lightning import LightningModule as M\nM", "from echelon import TrainModule as M\nM"),
        (
            "def f():\n    from lightning import Trainer, pytorch",
            "def f():\n    import echelon as pytorch\n    from echelon import Trainer",
        ),
        ("import lightning as L\nL.Fabric", "import echelon.lightning\nimport echelon as L\nL.lightning.Fabric"),
        ("import lightning as L, os\r\nL.Trainer\r\n", "import echelon as L, os\r\nL.Trainer\r\n"),
        (
            "import lightning as L\nmodule.pytorch.LightningModule",
            "import echelon as L\nmodule.pytorch.LightningModule",
        ),
    ],
)
def test_imports_of_every_shape_are_rewritten(before, after):
    assert port_program(before).source == after


def test_a_second_port_has_nothing_to_do():
    with pytest.raises(echelon.ConfigError, match="must import lightning or pytorch_lightning, found no such import"):
        port_program(port_program("import lightning as L\nL.Trainer()\n").source)


def test_the_command_shows_a_diff_and_writes_on_demand(tmp_path, capsys):
    file = tmp_path / "train.py"
    file.write_bytes(PROGRAM.encode())
    assert main(["port", str(file)]) == 0
    shown = capsys.readouterr()
    assert "-import lightning as L  # the framework\n" in shown.out
    assert "+import echelon as L  # the framework\n" in shown.out
    assert f"{file}:44: departs: Timer: the sanity check" in shown.out
    (places, notes) = re.search(r"(\d+ places?) changed, (\d+ notes?) on", shown.err).groups()
    assert all(text.endswith("s") == (text.split()[0] != "1") for text in (places, notes))
    assert file.read_text() == PROGRAM
    assert main(["port", "--write", str(file)]) == 0
    assert file.read_text() == port_program(PROGRAM).source


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.py", b"import lightning\ndef f(:\n", r"must be Python of this version, found .* in line 2"),
        ("a.py", b"import torch\n", "found no such import"),
        ("a.py", b"\x00\xff\xfe", "which is not text|must be Python"),
        ("a.ipynb", b"{}", "got the notebook"),
        ("folder", None, "got the folder"),
        ("absent.py", None, "No such file"),
    ],
)
def test_what_is_no_lightning_program_is_named_and_nothing_is_written(tmp_path, capsys, name, content, said):
    good, bad = tmp_path / "good.py", tmp_path / name
    good.write_text("import lightning as L\n")
    if content is not None:
        bad.write_bytes(content)
    elif name == "folder":
        bad.mkdir()
    assert main(["port", "--write", str(good), str(bad)]) == 2
    assert re.search(said, capsys.readouterr().err)
    assert good.read_text() == "import lightning as L\n"


def test_the_names_at_the_root_are_there():
    assert {RENAMED.get(name, name) for name in PUBLIC_AT_ROOT} <= set(echelon.__all__)
    assert [name for name in PUBLIC_AT_ROOT - set(RENAMED) if not issubclass_or_same(name)] == []


def issubclass_or_same(name):
    own, found = getattr(echelon, name), find_replacement(name)
    return inspect.unwrap(found) is own or own in getattr(found, "__mro__", ())


def rows_of(heading):
    section = (ROOT / "docs" / "lightning.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in section.splitlines() if line.startswith("| ")]
    return {re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", row).replace("`", "") for row in rows} - {"|", ""}


def test_the_page_and_the_table_have_the_same_rows():
    departing, missing = rows_of("Departures"), rows_of("No counterpart")
    rows = {departure.row for departure in DEPARTURES} | UNSEEN | BY_NAME
    by_name = {
        row
        for row in missing
        if all(has_counterpart(name) or name in WITHOUT_COUNTERPART for name in re.findall(r"\w{5,}", row))
    }
    assert rows - departing - missing == set(), "rows of lightning/departures.py that docs/lightning.md lacks"
    assert departing | missing <= rows | by_name, "rows of docs/lightning.md that lightning/departures.py lacks"
    assert {one.row for one in DEPARTURES if one.is_missing} <= missing


def test_flags_of_packages_and_names_of_fabric_are_imported_from_what_replaces_them(tmp_path):
    source = port_program(
        "from lightning.fabric.loggers import CSVLogger, TensorBoardLogger as Board\n"
        "from lightning.pytorch.utilities.imports import _RICH_AVAILABLE, _TORCHVISION_AVAILABLE\n"
        "from lightning.pytorch.loggers import TensorBoardLogger\n"
        "import echelon.lightning.own_loops.loggers as own\n"
        "assert CSVLogger is own.FabricCSVLogger and Board(root_dir='runs') is not None\n"
        "assert TensorBoardLogger is not Board and _TORCHVISION_AVAILABLE in (True, False)\n"
    ).source
    assert "lightning.fabric" not in source and "lightning.pytorch" not in source
    (tmp_path / "program.py").write_text(source)
    ran = run_program("program.py", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
