"""A setting that cannot be is refused when the trainer is built: with its name, the value found, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small import Noted, Regression, loader, quiet, raises
from torch.utils.data import DataLoader

from echelon import ConfigError, CSVLogger, EarlyStopping, ModelCheckpoint, TensorBoardLogger, Trainer


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"max_epoch": 3}, ["'max_epoch'", "3", "Did you mean 'max_epochs'?"]),
        ({"gradient_clip": 1.0}, ["'gradient_clip'", "1.0", "Did you mean 'gradient_clip_val'?"]),
        ({"strategy": "singel"}, ["strategy='singel'", "Did you mean 'single'?"]),
        ({"precision": "bf16-mixd"}, ["precision='bf16-mixd'", "Did you mean 'bf16-mixed'?"]),
        ({"precision": 8}, ["precision=8", "Choose one of:", "16-mixed", "64-true"]),
        ({"accelerator": "gpuu"}, ["accelerator='gpuu'", "Did you mean 'gpu'?"]),
        ({"devices": 0}, ["devices=0"]),
        ({"max_epochs": -2}, ["max_epochs=-2", "give -1 or more (-1 means no limit)"]),
        ({"max_steps": -5}, ["max_steps=-5", "-1 means no limit"]),
        ({"max_epochs": "3"}, ["max_epochs='3'", "wrong type str", "must be int or None"]),
        ({"max_epochs": True}, ["max_epochs=True", "wrong type bool"]),
        ({"max_epochs": 2.5}, ["max_epochs=2.5", "wrong type float"]),
        ({"limit_train_batches": 0}, ["limit_train_batches=0", "nothing to train on", "at least 1 batch"]),
        ({"limit_train_batches": 0.0}, ["limit_train_batches=0.0", "nothing to train on"]),
        ({"limit_val_batches": 1.5}, ["limit_val_batches=1.5", "fraction from 0.0 to 1.0"]),
        ({"limit_test_batches": -1}, ["limit_test_batches=-1", "number of batches as an int"]),
        ({"accumulate_grad_batches": 0}, ["accumulate_grad_batches=0", "give 1 or more"]),
        ({"gradient_clip_val": 0}, ["gradient_clip_val=0", "None for no clipping"]),
        ({"gradient_clip_val": -1.0}, ["gradient_clip_val=-1.0", "number above 0"]),
        ({"gradient_clip_algorithm": "nrm"}, ["gradient_clip_algorithm='nrm'", "'norm' or 'value'"]),
        ({"val_check_interval": 0}, ["val_check_interval=0", "fraction of an epoch up to 1.0"]),
        ({"val_check_interval": 2.0}, ["val_check_interval=2.0", "batches as an int"]),
        ({"check_val_every_n_epoch": None}, ["check_val_every_n_epoch=None", "val_check_interval=1.0", "as an int"]),
        ({"check_val_every_n_epoch": 0}, ["check_val_every_n_epoch=0", "give 1 or more"]),
        ({"fast_dev_run": -1}, ["fast_dev_run=-1", "number of batches"]),
        ({"global_batch_size": 0}, ["global_batch_size=0", "give 1 or more"]),
        (
            {"global_batch_size": 8, "accumulate_grad_batches": 2},
            ["global_batch_size=8", "accumulate_grad_batches=2", "give one of them"],
        ),
        ({"barebones": True, "detect_anomaly": True}, ["barebones=True", "detect_anomaly=True", "drop one"]),
        ({"profiler": "simpel"}, ["'simpel'", "Did you mean 'simple'?"]),
        ({"max_time": "1 hour"}, ["max_time='1 hour'", "DD:HH:MM:SS"]),
        ({"callbacks": [EarlyStopping]}, ["EarlyStopping", "pass instances of echelon.Callback"]),
        ({"logger": "tensorboard"}, ["logger='tensorboard'", "wrong type str", "bool or Logger"]),
        ({"callbacks": ModelCheckpoint()}, ["enable_checkpointing=False", "ModelCheckpoint", "drop one"]),
        ({"compile": "yes"}, ["compile='yes'", "wrong type str"]),
    ],
    ids=lambda value: " ".join(f"{k}={v!r:.20}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_a_setting_that_cannot_be_is_refused_when_the_trainer_is_built(settings: Any, parts: list[str]) -> None:
    with raises(ConfigError, *parts):
        quiet(**settings)


def test_positional_arguments_of_the_trainer_are_refused() -> None:
    with raises(ConfigError, "keyword arguments only", "('ddp',)", "Trainer(max_epochs=3)"):
        Trainer("ddp")


def test_max_epochs_minus_one_means_no_limit() -> None:
    trainer = quiet(max_epochs=-1, max_steps=9)
    trainer.fit(Regression(), loader())
    assert (trainer.global_step, trainer.current_epoch) == (9, 3)  # Lightning 2.6.6, too


def test_limit_val_batches_0_switches_validation_off() -> None:
    module, data = Regression(), Noted()
    quiet(max_epochs=1, limit_val_batches=0).fit(module, loader(), DataLoader(data, 2))
    assert len(module.seen) == 4
    assert module.validated == data.reads == []


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_two_loggers_to_one_folder_are_refused(tmp_path: Path, kind: Any) -> None:
    with raises(ConfigError, f"Two loggers of type {kind.__name__}", str(tmp_path), "different names or versions"):
        quiet(logger=[kind(tmp_path, version=3), kind(tmp_path, version=3)])


def test_a_root_dir_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    data, trainer = Noted(), quiet(tmp_path / "file" / "runs", logger=True)
    with raises(ConfigError, f"default_root_dir={str(tmp_path / 'file' / 'runs')!r}", "Not a directory", "another"):
        trainer.fit(Regression(), DataLoader(data, 2))
    assert data.reads == []
