"""Impossible settings are refused when the trainer is built: with their name, the value found, and what to do."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from small import Noted, Regression, loader, quiet, raises
from torch.utils.data import DataLoader

from echelon import (
    ConfigError,
    CSVLogger,
    EarlyStopping,
    LambdaCallback,
    ModelCheckpoint,
    TensorBoardLogger,
    Trainer,
)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"max_epoch": 3}, ["'max_epoch'", "3", "Did you mean 'max_epochs'?"]),
        ({"gradient_clip": 1.0}, ["'gradient_clip'", "1.0", "Did you mean 'gradient_clip_val'?"]),
        ({"strategy": "singel"}, ["strategy='singel'", "Did you mean 'single'?"]),
        ({"precision": "bf16-mixd"}, ["precision='bf16-mixd'", "Did you mean 'bf16-mixed'?"]),
        ({"precision": 8}, ["precision=8", "Choose one of:", "16-mixed", "64-true"]),
        ({"precision": "fp16"}, ["precision='fp16'", "Did you mean '16-mixed'?"]),
        ({"precision": "bfloat16"}, ["precision='bfloat16'", "Did you mean 'bf16-mixed'?"]),
        ({"precision": "transformer-engine"}, ["'transformer-engine'", "Did you mean 'bf16-mixed'?"]),
        ({"strategy": "ddp", "devices": 2, "sync_batchnorm": True}, ["sync_batchnorm=True", "needs GPUs", "'cpu'"]),
        ({"plugins": ["a plugin"]}, ["plugins must be None", "['a plugin']", "precision=", "strategy="]),
        ({"model_registry": "mine"}, ["model_registry must be None", "'mine'", "on_fit_end"]),
        ({"default_root_dir": "s4://bucket/runs"}, ["default_root_dir='s4://bucket/runs'", "scheme 's4'", "s3"]),
        ({"accelerator": "gpuu"}, ["accelerator='gpuu'", "Did you mean 'gpu'?"]),
        ({"devices": 0}, ["devices must be >= 1", "got 0"]),
        ({"max_epochs": -2}, ["`max_epochs` must be a non-negative integer or -1 (no limit)", "got -2"]),
        ({"max_steps": -5}, ["`max_steps` must be a non-negative integer or -1 (no limit)", "got -5"]),
        ({"max_epochs": "3"}, ["max_epochs='3'", "wrong type str", "must be int or None"]),
        ({"max_epochs": True}, ["max_epochs=True", "wrong type bool"]),
        ({"max_epochs": 2.5}, ["max_epochs=2.5", "wrong type float"]),
        ({"limit_val_batches": 1.5}, ["limit_val_batches was passed invalid value 1.5", "fraction from 0.0 to 1.0"]),
        ({"limit_test_batches": -1}, ["limit_test_batches was passed invalid value -1", "number of batches as an int"]),
        ({"accumulate_grad_batches": 0}, ["accumulate_grad_batches must be >= 1", "got 0"]),
        ({"gradient_clip_val": -1.0}, ["gradient_clip_val must be above 0", "got -1.0", "None for no clipping"]),
        ({"gradient_clip_algorithm": "nrm"}, ["gradient_clip_algorithm='nrm'", "'norm' or 'value'"]),
        ({"val_check_interval": 0}, ["val_check_interval must be above 0, got 0", "fraction of an epoch up to 1.0"]),
        ({"val_check_interval": 1.5}, ["val_check_interval was passed invalid value 1.5", "batches as an int"]),
        ({"val_check_interval": "10 min"}, ["val_check_interval='10 min'", "a duration 'DD:HH:MM:SS' nor a number"]),
        ({"log_every_n_steps": "often"}, ["log_every_n_steps='often'", "'2.5M tokens'"]),
        ({"log_every_n_steps": "0 tokens"}, ["log_every_n_steps must be at least 1 sample or token", "'0 tokens'"]),
        ({"log_every_n_steps": -1}, ["log_every_n_steps must be >= 0", "got -1"]),
        ({"overfit_batches": 1.5}, ["overfit_batches was passed invalid value 1.5", "batches as an int"]),
        ({"overfit_batches": None}, ["overfit_batches=None", "must be int or float"]),
        ({"min_epochs": 5, "max_epochs": 2}, ["min_epochs=5 is above max_epochs=2", "raise max_epochs"]),
        ({"min_steps": 5, "max_steps": 2}, ["min_steps=5 is above max_steps=2", "drop min_steps"]),
        ({"accumulate_grad_batches": {0: 2}}, ["got {0: 2}", "GradientAccumulationScheduler"]),
        (
            {"check_val_every_n_epoch": None, "val_check_interval": 0.5},
            ["an integer or a time-based duration", "check_val_every_n_epoch=None", "val_check_interval=0.5"],
        ),
        ({"check_val_every_n_epoch": 0}, ["check_val_every_n_epoch must be >= 1", "got 0"]),
        ({"fast_dev_run": -1}, ["fast_dev_run should be >= 0, got -1", "number of batches"]),
        ({"global_batch_size": 0}, ["global_batch_size must be >= 1", "got 0"]),
        (
            {"global_batch_size": 8, "accumulate_grad_batches": 2},
            ["global_batch_size=8", "accumulate_grad_batches=2", "give one of them"],
        ),
        ({"barebones": True, "detect_anomaly": True}, ["barebones=True", "detect_anomaly=True", "drop one"]),
        ({"barebones": True, "enable_progress_bar": True}, ["barebones=True", "enable_progress_bar=True", "drop"]),
        ({"barebones": True, "num_sanity_val_steps": 2}, ["barebones=True", "num_sanity_val_steps=2", "drop one"]),
        ({"profiler": "simpel"}, ["'simpel'", "Did you mean 'simple'?"]),
        ({"max_time": "1 hour"}, ["max_time", "format DD:HH:MM:SS, got '1 hour'"]),
        ({"callbacks": [EarlyStopping]}, ["EarlyStopping", "pass instances of echelon.Callback"]),
        ({"logger": "tensorbord"}, ["logger='tensorbord' is no logger's name", "Did you mean 'tensorboard'?"]),
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


# --- as in Lightning 2.6.6, which gave these values ---

OF_NONE = {
    **dict.fromkeys(("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"), 1.0),
    "val_check_interval": 1.0,
    "num_sanity_val_steps": 2,
    "log_every_n_steps": 50,
    "precision": "32-true",
    "enable_progress_bar": True,
    "enable_checkpointing": True,
    "enable_model_summary": True,
    "enable_advice": True,
    "logger": True,
    "deterministic": False,
    "gradient_clip_algorithm": "norm",
    "min_epochs": 0,
    "min_steps": 0,
}


@pytest.mark.parametrize(("name", "default"), OF_NONE.items())
def test_none_stands_for_the_default(name: str, default: object) -> None:
    assert getattr(Trainer(**{"accelerator": "cpu", name: None}).settings, name) == default  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["plugins", "model_registry", "callbacks", "default_root_dir", "max_epochs"])
def test_none_is_taken_where_it_asks_for_nothing(name: str) -> None:
    Trainer(**{"accelerator": "cpu", name: None})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["limit_train_batches", "limit_val_batches", "overfit_batches", "val_check_interval"])
def test_a_whole_float_above_1_counts_batches(name: str) -> None:
    value = getattr(quiet(**{name: 2.0}), name)
    assert value == 2
    assert isinstance(value, int)


PRECISIONS = {16: "16-mixed", "16": "16-mixed", "bf16": "bf16-mixed", 32: "32-true", "32": "32-true", 64: "64-true"}


@pytest.mark.parametrize(("short", "full"), [*PRECISIONS.items(), ("64", "64-true"), ("16-true", "16-true")])
def test_short_names_of_a_precision(short: str | int, full: str) -> None:
    assert quiet(precision=short).precision == full


def test_16_true_trains_in_float16() -> None:
    module = Regression()
    quiet(precision="16-true", max_epochs=1).fit(module, loader())
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float16}


def test_fast_dev_run_overrides_what_contradicts_it() -> None:
    settings = quiet(fast_dev_run=2, min_epochs=5, min_steps=9, overfit_batches=3).settings
    assert (settings.max_epochs, settings.max_steps, settings.min_epochs, settings.min_steps) == (1, 2, 0, 0)
    assert (settings.limit_train_batches, settings.limit_test_batches) == (3, 2)


def test_a_logger_of_fast_dev_run_takes_every_call_and_writes_nothing(tmp_path: Path) -> None:
    class Logging(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            experiment: Any = self.logger
            experiment.experiment.add_scalar("x", 1.0, 0)
            return super().training_step(batch, batch_idx)

    module, trainer = Logging(), quiet(tmp_path, fast_dev_run=True, logger=True)
    trainer.fit(module, loader())
    assert (len(module.seen), trainer.log_dir) == (1, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert quiet(fast_dev_run=True).logger is None


@pytest.mark.parametrize(
    ("settings", "num_samples"), [({"limit_train_batches": 0}, 8), ({"limit_train_batches": 0.0}, 8), ({}, 0)]
)
def test_nothing_to_train_is_a_warning(settings: Any, num_samples: int) -> None:
    hooks: list[str] = []
    noting = LambdaCallback(on_train_start=lambda *_: hooks.append("train"))
    module, trainer = Regression(), quiet(max_epochs=2, callbacks=noting, **settings)
    with pytest.warns(UserWarning, match="Nothing is trained: limit_train_batches"):
        trainer.fit(module, loader(num_samples), loader())
    assert (trainer.global_step, trainer.current_epoch, module.seen, hooks) == (0, 0, [], [])


def test_clipping_by_0_is_no_clipping() -> None:
    weights = []
    for limit in (None, 0, 0.0):
        torch.manual_seed(0)
        module = Regression()
        quiet(max_epochs=1, gradient_clip_val=limit).fit(module, loader())
        weights.append(module.net.weight)
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


def test_a_duration_between_validations_goes_by_the_clock() -> None:
    counts = {}
    for name, settings in {
        "none so soon": {"val_check_interval": "00:01:00:00"},
        "after each step": {"val_check_interval": timedelta(seconds=0)},
        "after each step of each second epoch": {"val_check_interval": {"seconds": 0}, "check_val_every_n_epoch": 2},
        "across epochs": {"val_check_interval": "00:00:00:00", "check_val_every_n_epoch": None},
        "after each epoch": {"check_val_every_n_epoch": None},
    }.items():
        module = Regression()
        quiet(max_epochs=2, **settings).fit(module, loader(), loader(2))
        counts[name] = len(module.validated)
    assert list(counts.values()) == [0, 8, 4, 8, 2]


def test_the_clock_of_validations_begins_again_after_each() -> None:
    class Slow(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(0.02)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            super().validation_step(batch, batch_idx)
            time.sleep(0.2)

    module = Slow()
    quiet(max_epochs=4, val_check_interval={"milliseconds": 150}).fit(module, loader(), loader(2))
    assert 1 <= len(module.validated) <= 3  # every 8 of 16 steps, or fewer on a busy machine


def test_the_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert quiet(Path("~/runs")).default_root_dir == str(tmp_path / "runs")


def test_hyperparameters_are_not_sent_to_the_loggers_if_nobody_wants_them(tmp_path: Path) -> None:
    class Saving(Regression):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__(lr)
            self.save_hyperparameters()

    for wanted in (True, False):
        logger = CSVLogger(tmp_path, name=str(wanted))
        quiet(max_epochs=1, logger=logger, enable_autolog_hparams=wanted).fit(Saving(), loader())
        assert (Path(logger.log_dir) / "hparams.yaml").exists() is wanted


class CountsValidations(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        super().validation_step(batch, batch_idx)
        self.log("validations", float(len(self.validated)), reduce_fx="max")


def test_several_ranks_validate_at_the_same_steps_by_the_clock() -> None:
    trainer = quiet(strategy="ddp", devices=2, max_epochs=3, val_check_interval={"seconds": 0})
    trainer.fit(CountsValidations(), loader(16), loader(4))
    assert trainer.callback_metrics["validations"] >= 1
