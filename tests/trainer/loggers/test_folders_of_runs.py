"""Folders of runs: each logger of a resumed run continues its own."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import echelon

QUIET: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}


class Net(echelon.TrainModule):
    """Logs its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Failing(Net):
    """Fails where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def setup(self, stage: str) -> None:
        self.fail("setup")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.fail("configure_optimizers")
        return super().configure_optimizers()

    def on_train_start(self) -> None:
        if self.where == "on_train_start, with a file":
            Path(str(self.trainer.log_dir), "notes.txt").write_text("mine")
        self.fail("on_train_start")

    def on_train_step_end(self) -> None:
        self.fail("on_train_step_end")

    def fail(self, where: str) -> None:
        if self.where.startswith(where):
            raise ValueError(f"failed in {where}")


def fit(folder: Path, max_epochs: int) -> None:
    loggers = [
        echelon.TensorBoardLogger(folder, name="curves"),
        echelon.CSVLogger(folder, name="tables"),
        echelon.CSVLogger(folder / "others", name="tables"),
    ]
    trainer = echelon.Trainer(max_epochs=max_epochs, default_root_dir=folder, logger=loggers, **QUIET)
    trainer.fit(Net(), DataLoader(torch.ones(8, 2), batch_size=2), ckpt_path="last")


def steps_in(table: Path) -> list[int]:
    with table.open() as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


def test_every_logger_of_a_resumed_run_continues_its_folder(tmp_path: Path) -> None:
    fit(tmp_path, 1)
    fit(tmp_path, 3)
    for name in ("curves", "tables", "others/tables"):
        assert [path.name for path in (tmp_path / name).iterdir()] == ["version_0"]
    for name in ("tables", "others/tables"):
        assert steps_in(tmp_path / name / "version_0" / "metrics.csv") == [*range(1, 13)]


def test_a_run_that_is_no_resume_gets_folders_of_its_own(tmp_path: Path) -> None:
    fit(tmp_path / "one", 1)
    (tmp_path / "two").mkdir()
    for _ in range(2):
        loggers = [echelon.CSVLogger(tmp_path, name="first"), echelon.CSVLogger(tmp_path, name="second")]
        trainer = echelon.Trainer(max_epochs=1, logger=loggers, **QUIET)
        trainer.fit(Net(), DataLoader(torch.ones(8, 2), batch_size=2))
    for name in ("first", "second"):
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["version_0", "version_1"]


def fail(folder: Path, where: str, **settings: Any) -> echelon.Trainer:
    loggers = [
        echelon.TensorBoardLogger(folder, name="curves", sub_dir="below"),
        echelon.CSVLogger(folder, name="tables"),
        echelon.CSVLogger(folder, name="tables", version="named"),
    ]
    trainer = echelon.Trainer(max_epochs=1, default_root_dir=folder, logger=loggers, **QUIET, **settings)
    with pytest.raises(ValueError, match="failed in"):
        trainer.fit(Failing(where), DataLoader(torch.ones(8, 2), batch_size=2))
    return trainer


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("where", ["setup", "configure_optimizers", "on_train_start"])
def test_a_run_that_fails_before_it_writes_leaves_no_folder(tmp_path: Path, where: str) -> None:
    trainer = fail(tmp_path, where)
    assert sorted(path.name for path in tmp_path.glob("**/*")) == ["curves", "tables"]
    trainer.fit(Net(), DataLoader(torch.ones(8, 2), batch_size=2))  # the same Trainer goes on in the same folder
    assert steps_in(tmp_path / "tables" / "version_0" / "metrics.csv") == [1, 2, 3, 4]


def test_a_run_of_two_processes_that_fails_before_it_writes_leaves_no_folder(tmp_path: Path) -> None:
    fail(tmp_path, "configure_optimizers", strategy="ddp", devices=2, accelerator="cpu")
    assert sorted(path.name for path in tmp_path.glob("**/*")) == ["curves", "tables"]


def test_a_run_that_fails_later_keeps_what_it_wrote(tmp_path: Path) -> None:
    fail(tmp_path, "on_train_step_end")
    assert "tables/version_0/metrics.csv" in files_below(tmp_path)


def test_a_file_of_the_users_and_a_folder_that_was_there_stay(tmp_path: Path) -> None:
    (tmp_path / "tables" / "named").mkdir(parents=True)
    fail(tmp_path, "on_train_start, with a file")
    assert files_below(tmp_path) == ["curves/version_0/below/notes.txt"]
    assert [path.name for path in (tmp_path / "tables").iterdir()] == ["named"]
