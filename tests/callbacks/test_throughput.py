"""Throughput: what is counted, what is timed, and that a resumed run continues."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from recording_logger import RecordingLogger
from scripted import Scripted, batches, trainer_in

from echelon.callbacks import LambdaCallback, ThroughputMonitor, Timer
from echelon.common.errors import ConfigError

FORWARD = 2 * 2 * 2 * 1
"""FLOPs of ``Linear(2, 1)`` on two samples; the inputs need no gradient, so the backward costs as much."""


def fit(folder: Path, monitor: ThroughputMonitor, *others: Any, **settings: Any) -> RecordingLogger:
    logger = RecordingLogger(str(folder))
    trainer = trainer_in(
        folder, monitor, *others, **{"logger": logger, "log_every_n_steps": 1, "max_epochs": 1, **settings}
    )
    trainer.fit(Scripted(), batches(), batches(4))
    return logger


def test_samples_tokens_and_batches_are_counted(tmp_path: Path) -> None:
    logger = fit(tmp_path, ThroughputMonitor(length_fn=lambda batch: batch[0].numel()))
    assert logger.series("throughput/samples") == [(1, 2), (2, 4), (3, 6), (4, 8)]
    assert logger.series("throughput/tokens") == [(1, 4), (2, 8), (3, 12), (4, 16)]
    for step in range(4):
        samples, tokens, per_batch = (
            logger.series(f"throughput/{name}_per_sec")[step][1] for name in ("samples", "tokens", "batches")
        )
        assert samples == pytest.approx(2 * per_batch)
        assert tokens == pytest.approx(4 * per_batch)


def test_the_users_count_of_samples_wins(tmp_path: Path) -> None:
    logger = fit(tmp_path, ThroughputMonitor(batch_size_fn=lambda batch: 100), log_every_n_steps=4)
    assert logger.series("throughput/samples") == [(4, 400)]


def test_rates_are_means_over_the_window(tmp_path: Path) -> None:
    logger = fit(tmp_path, ThroughputMonitor(window_size=2), max_epochs=3)
    seconds = [0.0] + [value for _, value in logger.series("throughput/seconds")]
    for step, rate in logger.series("throughput/batches_per_sec")[2:]:
        assert rate == pytest.approx(2 / (seconds[step] - seconds[step - 2]))


def test_validation_is_no_training_time(tmp_path: Path) -> None:
    timer = Timer()
    pause = LambdaCallback(on_validation_batch_start=lambda *_: time.sleep(0.02))
    logger = fit(tmp_path, ThroughputMonitor(), timer, pause, val_check_interval=1)
    assert timer.time_elapsed("train") - logger.series("throughput/seconds")[-1][1] >= 4 * 2 * 0.02


def test_flops_are_counted_in_the_first_micro_batch(tmp_path: Path) -> None:
    logger = fit(tmp_path, ThroughputMonitor(available_flops=1e6), max_epochs=2)
    for step, flops in logger.series("throughput/flops_per_sec"):
        rate = dict(logger.series("throughput/batches_per_sec"))[step]
        assert flops == pytest.approx(2 * FORWARD * rate)
        assert dict(logger.series("throughput/mfu"))[step] == pytest.approx(flops / 1e6)
    assert [step for step, _ in logger.series("throughput/mfu")] == list(range(2, 9))


def test_given_flops_are_not_counted_again(tmp_path: Path) -> None:
    logger = fit(tmp_path, ThroughputMonitor(flops_per_batch=10.0, available_flops=100.0))
    for (_, mfu), (_, rate) in zip(
        logger.series("throughput/mfu"), logger.series("throughput/batches_per_sec"), strict=True
    ):
        assert mfu == pytest.approx(rate / 10)


def test_without_a_known_peak_there_is_no_mfu(tmp_path: Path) -> None:
    assert not fit(tmp_path, ThroughputMonitor()).names("throughput/mfu")


def test_a_counting_that_is_interrupted_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupt(*_: Any) -> None:
        raise RuntimeError("enough")

    monitor = ThroughputMonitor(available_flops=1e6)
    with pytest.raises(RuntimeError, match="enough"):
        fit(tmp_path, monitor, LambdaCallback(on_after_backward=interrupt))
    logger = fit(tmp_path, monitor)
    assert logger.series("throughput/mfu")


def test_totals_go_on_in_a_resumed_run(tmp_path: Path) -> None:
    first = trainer_in(tmp_path, ThroughputMonitor(length_fn=lambda batch: 3), max_epochs=1)
    first.fit(Scripted(), batches())
    first.save_checkpoint(tmp_path / "one.ckpt")
    before = first.callbacks[0].state_dict()
    logger = RecordingLogger(str(tmp_path))
    monitor = ThroughputMonitor(length_fn=lambda batch: 3)
    second = trainer_in(tmp_path, monitor, max_epochs=2, logger=logger, log_every_n_steps=4)
    second.fit(Scripted(), batches(), ckpt_path=tmp_path / "one.ckpt")
    assert logger.series("throughput/samples") == [(8, 16)]
    assert logger.series("throughput/tokens") == [(8, 24)]
    assert logger.series("throughput/seconds")[0][1] > before["seconds"]


@pytest.mark.parametrize("name", ["window_size", "flops_per_batch", "available_flops"])
def test_a_setting_that_is_not_positive_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be above 0, got 0"):
        ThroughputMonitor(**{name: 0})


def test_the_separator_of_names_can_be_chosen(tmp_path: Path) -> None:
    logger = fit(tmp_path, ThroughputMonitor(separator="."))
    assert logger.series("throughput.samples") == [(1, 2), (2, 4), (3, 6), (4, 8)]
