"""What a fit says: a line about its start, one about its end; none without a progress bar."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import Scripted, batches, trainer_in
from torch.utils.data import DataLoader

from echelon import Callback, CSVLogger, EarlyStopping, ModelCheckpoint, OmitFrozenWeights, TrainModule
from echelon.testing import run_ranks


class Logging(Scripted):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def fit(folder: Path, *callbacks: Callback, ckpt_path: Any = None, **settings: Any) -> None:
    settings = {"enable_progress_bar": True, "max_epochs": 1, "logger": CSVLogger(folder), **settings}
    trainer_in(folder, *callbacks, **settings).fit(Logging(), batches(), ckpt_path=ckpt_path)


def test_a_fit_says_where_it_starts_and_what_it_leaves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def lines() -> list[str]:
        found = capsys.readouterr().out.splitlines()
        return [line.replace(str(tmp_path), "~") for line in found if not line.startswith("Epoch")]

    saver = ModelCheckpoint(monitor="loss")
    fit(tmp_path, saver, ckpt_path="last")
    logs = "logs: ~/echelon_logs/version_0"
    first, last = lines()
    assert first == "Training on cpu from the beginning: no checkpoint found for ckpt_path='last'."
    saved = "~/echelon_logs/version_0/checkpoints/epoch=0-step=4.ckpt"
    assert re.fullmatch(rf"Trained to step 4; {logs}; best checkpoint: {re.escape(saved)} \(loss=[\d.e-]+\)", last)
    fit(tmp_path, ModelCheckpoint(), ckpt_path="last", max_epochs=2)
    saved_next = saved.replace("epoch=0-step=4", "epoch=1-step=8")
    assert lines() == [
        f"Training on cpu, resumed from {saved} at step 4.",
        f"Trained to step 8; {logs}; last checkpoint: {saved_next}",
    ]
    fit(tmp_path, logger=False)
    assert lines() == ["Training on cpu.", "Trained to step 4"]
    fit(tmp_path, EarlyStopping("loss", patience=1, mode="max"), logger=False, max_epochs=9)
    end = lines()[1]
    assert re.fullmatch(r"Trained to step \d+; stopping: loss did not improve on [\d.e-]+ in 1 checks", end), end


class Adapted(TrainModule):
    """A layer with an adapter of peft."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        peft: Any = pytest.importorskip("peft")
        base = torch.nn.Sequential(torch.nn.Linear(2, 1000))
        self.model = peft.get_peft_model(base, peft.LoraConfig(r=rank, target_modules=["0"]))

    def training_step(self, batch: Any) -> Any:
        return self.model(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.1)


@pytest.mark.parametrize(
    ("rank", "callbacks", "is_told"),
    [
        (1, [ModelCheckpoint()], True),
        (1, [ModelCheckpoint(), OmitFrozenWeights()], False),
        (1, [], False),
        (4, [ModelCheckpoint()], False),  # most is trained
    ],
)
def test_who_saves_the_base_of_adapters_is_told_its_size(
    rank: int, callbacks: list[Callback], is_told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = trainer_in(tmp_path, *callbacks, enable_progress_bar=True, max_epochs=1, logger=False)
    trainer.fit(Adapted(rank), DataLoader(torch.zeros(2, 2)))
    assert ("holds 12.0 kB of frozen weights beside the adapters" in capsys.readouterr().out) == is_told


def test_without_a_bar_it_is_only_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "echelon"):
        fit(tmp_path, enable_progress_bar=False, logger=False)
    assert capsys.readouterr().out == ""
    assert "Training on cpu." in caplog.messages


def of_rank(folder: Path) -> str:
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as out:
        fit(folder, logger=False, strategy="ddp")
    return out.getvalue()


def test_rank_0_alone_says_it(tmp_path: Path) -> None:
    first, second = run_ranks(of_rank, 2, tmp_path)
    assert "Training on cpu in 2 processes.\n" in first and "\nTrained to step 2\n" in first
    assert second == ""
