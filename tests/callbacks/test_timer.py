"""The timer: what it measures, when it ends training, and that a resumed run keeps counting."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from scripted import Scripted, batches, trainer_in

from echelon.callbacks import LambdaCallback, Timer
from echelon.common.durations import parse_duration
from echelon.common.errors import ConfigError


def test_training_ends_at_the_next_step_when_the_time_is_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wait = LambdaCallback(on_train_batch_start=lambda *_: time.sleep(0.06))
    trainer = trainer_in(tmp_path, Timer(timedelta(seconds=0.1)), wait, max_epochs=5)
    trainer.fit(Scripted(), batches())
    assert 1 <= trainer.global_step <= 2
    assert "Timer: Time limit reached. Training has lasted 0:00:00 of 0:00:00.100000." in capsys.readouterr().out


def test_training_ends_after_the_epoch_if_the_interval_is_one(tmp_path: Path) -> None:
    wait = LambdaCallback(on_train_batch_start=lambda *_: time.sleep(0.03))
    trainer = trainer_in(tmp_path, Timer(timedelta(seconds=0.05), "epoch", verbose=False), wait, max_epochs=5)
    trainer.fit(Scripted(), batches())
    assert trainer.global_step == 4


def test_no_time_at_all_trains_no_step(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, Timer(timedelta(0), verbose=False), max_epochs=5)
    trainer.fit(Scripted(), batches())
    assert trainer.global_step == 0


def test_without_a_duration_it_only_measures(tmp_path: Path) -> None:
    timer = Timer()
    trainer = trainer_in(tmp_path, timer, max_epochs=2)
    trainer.fit(Scripted(), batches(), batches(4))
    assert trainer.global_step == 8
    start, end = timer.start_time(), timer.end_time()
    assert start is not None
    assert end is not None
    assert timer.time_elapsed() == pytest.approx(end - start)
    assert 0 < timer.time_elapsed("validate") < timer.time_elapsed("train")
    assert timer.time_elapsed("test") == 0.0
    assert timer.time_remaining() is None


def test_a_resumed_run_counts_on(tmp_path: Path) -> None:
    wait = LambdaCallback(on_train_batch_start=lambda *_: time.sleep(0.02))
    first = Timer()
    trainer = trainer_in(tmp_path, first, wait, max_epochs=1)
    trainer.fit(Scripted(), batches())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    second = Timer(timedelta(seconds=first.time_elapsed()), verbose=False)
    resumed = trainer_in(tmp_path, second, max_epochs=9)
    resumed.fit(Scripted(), batches(), ckpt_path=tmp_path / "one.ckpt")
    assert resumed.global_step <= 5
    assert second.time_elapsed() >= first.time_elapsed()
    remaining = second.time_remaining()
    assert remaining is not None
    assert remaining <= 0


@pytest.mark.parametrize(
    "duration", ["00:01:30:00", timedelta(minutes=90), {"hours": 1, "minutes": 30}], ids=["text", "timedelta", "dict"]
)
def test_a_duration_has_three_forms(duration: Any) -> None:
    assert Timer(duration).time_remaining() == 5400.0
    assert parse_duration("max_time", duration) == timedelta(minutes=90)


@pytest.mark.parametrize("duration", ["90 minutes", "1:2:3", {"fortnights": 1}, 90, timedelta(seconds=-1)])
def test_what_is_no_duration_is_refused(duration: Any) -> None:
    with pytest.raises(ConfigError, match="duration must be a timedelta, .*, got"):
        Timer(duration)


def test_an_unknown_interval_or_stage_is_pointed_out() -> None:
    with pytest.raises(ConfigError, match="interval='steps'; it must be 'step' or 'epoch'. Did you mean 'step'?"):
        Timer(interval="steps")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="stage must be one of .*, got 'training'. Did you mean 'train'?"):
        Timer().time_elapsed("training")  # type: ignore[arg-type]
