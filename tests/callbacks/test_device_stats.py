"""Statistics of the device in the loggers."""

from __future__ import annotations

from pathlib import Path

import pytest
from recording_logger import RecordingLogger
from scripted import Scripted, batches, trainer_in

from echelon.callbacks import DeviceStatsMonitor


@pytest.mark.parametrize("cpu_stats", [None, True])
def test_the_cpu_is_logged_when_the_trainer_logs(tmp_path: Path, cpu_stats: bool | None) -> None:
    logger = RecordingLogger(str(tmp_path))
    trainer = trainer_in(tmp_path, DeviceStatsMonitor(cpu_stats), logger=logger, log_every_n_steps=2, max_epochs=1)
    trainer.fit(Scripted(), batches())
    memory = logger.series("DeviceStatsMonitor/rss_bytes") or logger.series("DeviceStatsMonitor/peak_rss_bytes")
    busy = logger.series("DeviceStatsMonitor/cpu_percent")
    assert [step for step, _ in memory] == [step for step, _ in busy] == [2, 4]
    assert all(value > 50e6 for _, value in memory)  # torch alone is larger
    assert all(value > 0 for _, value in busy)


def test_the_cpu_can_be_left_out(tmp_path: Path) -> None:
    logger = RecordingLogger(str(tmp_path))
    trainer = trainer_in(
        tmp_path, DeviceStatsMonitor(cpu_stats=False), logger=logger, log_every_n_steps=1, max_epochs=1
    )
    trainer.fit(Scripted(), batches())
    assert logger.names("DeviceStatsMonitor/") == set()


@pytest.mark.gpu
def test_a_gpu_is_logged_with_torchs_names(tmp_path: Path) -> None:
    logger = RecordingLogger(str(tmp_path))
    settings = {"logger": logger, "log_every_n_steps": 1, "max_epochs": 1, "accelerator": "gpu", "devices": 1}
    trainer_in(tmp_path, DeviceStatsMonitor(), **settings).fit(Scripted(), batches())
    assert logger.series("DeviceStatsMonitor/allocated_bytes.all.peak")[-1][1] > 0
    assert not logger.series("DeviceStatsMonitor/cpu_percent")
