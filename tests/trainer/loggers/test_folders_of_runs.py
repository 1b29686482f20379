"""Folders of runs: each logger of a resumed run continues its own."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

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
