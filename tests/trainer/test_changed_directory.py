"""Relative folders are those of the moment at which a run starts, also if a hook changes the working directory."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from small import Regression, loader, quiet

from echelon import Callback, CSVLogger, ModelCheckpoint, TensorBoardLogger
from echelon.callbacks import OnExceptionCheckpoint


class Moves(Callback):
    """Changes the working directory in one hook, as libraries that write where they are do."""

    def __init__(self, folder: Path, hook: str) -> None:
        self.folder = folder
        setattr(self, hook, self.move)

    def move(self, *_: Any) -> None:
        os.chdir(self.folder)


def found_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.ckpt"))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "start").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "start")
    return tmp_path


@pytest.mark.parametrize("hook", ["setup", "on_fit_start", "on_train_epoch_start", "on_train_epoch_end"])
@pytest.mark.parametrize("settings", [{}, {"default_root_dir": "runs"}], ids=["root", "relative"])
def test_everything_of_a_run_is_below_the_folder_in_which_it_starts(hook, settings, place):
    callbacks = [
        Moves(place / "elsewhere", hook),
        ModelCheckpoint("kept", save_last=True),
        ModelCheckpoint(monitor="step"),
    ]
    made = quiet(max_epochs=1, callbacks=callbacks, enable_checkpointing=True, logger=True, **settings)
    made.fit(Regression(), loader())
    root = place / "start" / settings.get("default_root_dir", "")
    assert made.default_root_dir == str(root)
    assert Path(made.checkpoint_callback.best_model_path).is_dir()
    assert list((place / "elsewhere").iterdir()) == []
    [version] = (root / "echelon_logs").iterdir()
    assert found_in(place / "start") == sorted(
        [
            "kept/epoch=0-step=4.ckpt",
            "kept/last.ckpt",
            str((version / "checkpoints/epoch=0-step=4.ckpt").relative_to(place / "start")),
        ]
    )


def test_last_is_the_newest_of_all_fits_of_a_trainer_and_of_those_that_start_where_it_did(place):
    moves = Moves(place / "elsewhere", "on_train_epoch_end")
    settings: dict[str, Any] = {"callbacks": [moves, ModelCheckpoint("kept", save_last=True)]}
    settings |= {"enable_checkpointing": True, "logger": [CSVLogger("csv"), TensorBoardLogger("tb")]}
    made = quiet(max_epochs=2, **settings)
    made.fit(Regression(), loader())
    module = Regression()
    made.fit(module, loader(), ckpt_path="last")  # from elsewhere
    assert made.global_step == 8
    os.chdir(place / "start")
    settings["callbacks"] = [Moves(place / "elsewhere", "setup"), ModelCheckpoint("kept", save_last=True)]
    again = quiet(max_epochs=3, **{**settings, "logger": False})
    again.fit(module, loader(), ckpt_path="kept/last.ckpt")
    assert again.global_step == 12
    os.chdir(place / "start")
    final = quiet(max_epochs=3, callbacks=[ModelCheckpoint("kept")], enable_checkpointing=True)
    final.fit(module, loader(), ckpt_path="last")
    assert final.global_step == 12
    assert list((place / "elsewhere").iterdir()) == []


class Raises(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 3:
            raise ValueError("enough")
        return super().training_step(batch, batch_idx)


def test_the_checkpoint_of_an_error_and_a_users_relative_path_are_where_they_say(place):
    saves = OnExceptionCheckpoint("kept")
    moves = Moves(place / "elsewhere", "on_train_start")
    made = quiet(max_epochs=1, callbacks=[moves, saves])
    with pytest.raises(ValueError, match="enough"):
        made.fit(Raises(), loader())
    assert found_in(place / "start") == ["kept/on_exception.ckpt"]
    made = quiet(max_epochs=1, callbacks=moves)
    made.fit(Regression(), loader())
    made.save_checkpoint("mine.ckpt")  # the user's own, from where the program is now
    assert (place / "elsewhere" / "mine.ckpt").is_dir()


@pytest.mark.parametrize("strategy", ["ddp"])
def test_processes_of_a_run_write_where_the_caller_started_it(strategy, place):
    callbacks = [Moves(place / "elsewhere", "on_fit_start"), ModelCheckpoint("kept")]
    made = quiet(max_epochs=1, callbacks=callbacks, enable_checkpointing=True, strategy=strategy, devices=2)
    torch.manual_seed(0)
    made.fit(Regression(), loader(8, 1))
    assert found_in(place / "start") == ["kept/epoch=0-step=4.ckpt"]
    assert made.checkpoint_callback.best_model_path == str(place / "start" / "kept" / "epoch=0-step=4.ckpt")
    assert list((place / "elsewhere").iterdir()) == []
