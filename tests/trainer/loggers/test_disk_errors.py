"""A disk that refuses a logger's files does not end a run: loggers keep their data, and write it when they can."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from small import Regression, loader, quiet

from echelon import Callback, ConfigError, CSVLogger, ModelCheckpoint, TensorBoardLogger

NUM_STEPS = 40


class Logging(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 3})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class Breaks(Callback):
    """Puts a file in the place of the folder of each logger, or deletes that; the file goes after some steps."""

    def __init__(self, how: str, mended_at: int) -> None:
        self.how, self.mended_at = how, mended_at

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        folders = [Path(logger.log_dir) for logger in trainer.loggers]
        if trainer.global_step == 6:
            for logger, folder in zip(trainer.loggers, folders, strict=True):
                logger.save()
                shutil.rmtree(folder)
                if self.how == "blocked":
                    folder.write_text("in the way")
        if trainer.global_step == self.mended_at and self.how == "blocked":
            for folder in folders:
                folder.unlink()


def steps_of(logger: Any) -> list[int]:
    if isinstance(logger, CSVLogger):
        lines = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
        return [int(line.split(",")[0]) for line in lines[1:]]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(logger.log_dir)
    events.Reload()
    return [event.step for event in events.Scalars("loss")]


@pytest.mark.filterwarnings(
    "ignore:.*cannot write.*training continues", "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)
@pytest.mark.parametrize("every", [1, 100])
@pytest.mark.parametrize("how", ["deleted", "blocked"])
@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_a_run_goes_on_and_its_curve_too(tmp_path: Path, kind: Any, how: str, every: int) -> None:
    options = {"flush_logs_every_n_steps": every} if kind is CSVLogger else {}
    logger = kind(tmp_path, "logs", **options)
    saver = ModelCheckpoint(tmp_path / "ckpt")
    trainer = quiet(
        tmp_path,
        logger=logger,
        callbacks=[Breaks(how, 20), saver],
        enable_checkpointing=True,
        max_steps=NUM_STEPS,
        max_epochs=-1,
        log_every_n_steps=1,
    )
    trainer.fit(Logging(), loader())
    assert trainer.global_step == NUM_STEPS
    assert saver.best_model_path.endswith("step=40.ckpt")
    assert steps_of(logger)[-34:] == list(range(7, 41))  # six were in the folder that is gone


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_it_is_said_once_and_the_run_ends_well_if_the_disk_never_comes_back(tmp_path: Path, kind: Any) -> None:
    logger = kind(tmp_path, "logs")
    saver = ModelCheckpoint(tmp_path / "ckpt")
    settings = {"callbacks": [Breaks("blocked", -1), saver], "enable_checkpointing": True, "log_every_n_steps": 1}
    trainer = quiet(tmp_path, logger=logger, max_epochs=5, **settings)
    with pytest.warns(UserWarning, match=f"{kind.__name__} cannot write .* training continues"):
        trainer.fit(Logging(), loader())
    assert trainer.global_step == 20
    assert Path(saver.best_model_path).is_dir()


class Full(CSVLogger):
    """A logger of the user's, whose disk is full."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        raise OSError(28, "No space left on device")


def test_a_logger_of_the_users_ends_no_run_either(tmp_path: Path) -> None:
    trainer = quiet(tmp_path, logger=Full(tmp_path), max_epochs=2, log_every_n_steps=1)
    with pytest.warns(UserWarning, match="Full cannot write"):
        trainer.fit(Logging(), loader())
    assert trainer.global_step == 8


def test_an_append_that_fails_in_its_middle_leaves_no_half_of_it(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=10_000)
    logger.log_metrics({"loss": 0.5}, 1)
    logger.save()
    for step in range(2, 3000):
        logger.log_metrics({"loss": step / 7}, step)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            logger.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert steps_of(logger) == [1]
    logger.save()
    assert steps_of(logger) == list(range(1, 3000))


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00", b"step\n\x00\n", b"step\n-5\n", b"step,loss\n" + b"9" * 5000 + b",1\n"]
)
def test_what_is_not_a_table_is_refused(tmp_path: Path, content: bytes) -> None:
    logger = CSVLogger(tmp_path, version=0)
    (tmp_path / "echelon_logs" / "version_0").mkdir(parents=True)
    (tmp_path / "echelon_logs" / "version_0" / "metrics.csv").write_bytes(content)
    logger.open()
    with pytest.raises(ConfigError, match="must be a table of a CSVLogger"):
        logger.resume_at(3)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_a_table_that_is_no_file_is_refused(tmp_path: Path, make: Any) -> None:
    logger = CSVLogger(tmp_path, version=0)
    (tmp_path / "echelon_logs" / "version_0").mkdir(parents=True)
    make(tmp_path / "echelon_logs" / "version_0" / "metrics.csv")
    with pytest.raises(ConfigError, match="not a regular file"):
        logger.resume_at(3)
