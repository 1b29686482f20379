"""OnExceptionCheckpoint: written on an error, resumed from, and absent after a run that ends normally."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small import Regression, loader, quiet, raises

from echelon import Callback, ConfigError, OnExceptionCheckpoint


class Fails(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == self.step:
            raise ZeroDivisionError("planned")


def test_a_run_goes_on_from_the_checkpoint_of_its_error(tmp_path: Path) -> None:
    saver = OnExceptionCheckpoint(tmp_path / "at")
    assert saver.ckpt_path == str(tmp_path / "at" / "on_exception.ckpt")
    with pytest.raises(ZeroDivisionError):
        quiet(tmp_path, max_epochs=2, callbacks=[saver, Fails(3)]).fit(Regression(), loader())
    again, whole = Regression(), Regression()
    whole.load_state_dict(again.state_dict())
    trainer = quiet(tmp_path, max_epochs=2, callbacks=OnExceptionCheckpoint(tmp_path / "at"))
    trainer.fit(again, loader(), ckpt_path=saver.ckpt_path)
    assert trainer.global_step == 8
    assert not torch.equal(again.net.weight, whole.net.weight)


def test_a_run_that_ends_well_leaves_nothing(tmp_path: Path) -> None:
    quiet(tmp_path, max_epochs=1, callbacks=OnExceptionCheckpoint(tmp_path / "at")).fit(Regression(), loader())
    assert not (tmp_path / "at").exists()


def test_what_is_impossible_is_refused(tmp_path: Path) -> None:
    with raises(ConfigError, "filename must be a name without an extension, got ''"):
        OnExceptionCheckpoint(tmp_path, "")
