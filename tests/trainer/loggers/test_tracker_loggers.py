"""MLFlowLogger and WandbLogger: what their own clients read back, runs that continue, and stores that refuse."""

from __future__ import annotations

import argparse
import os
import pickle
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from recording_logger import RecordingLogger
from small import Regression, loader, quiet, raises
from sweep import IS_SWEEP

from echelon import Callback, ConfigError, ElasticStrategy, Logger, MLFlowLogger, ModelCheckpoint, WandbLogger
from echelon.trainer.loggers.tracker import is_same
from echelon.trainer.loggers.wandb_file import read_history

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Logging(Regression):
    """Logs a value of each step and one of each epoch; its hyper-parameters have all kinds of types."""

    def __init__(self, lr: float = 0.1, act: Any = torch.nn.ReLU, betas: Any = (0.9, 0.99)) -> None:
        super().__init__(lr)
        self.save_hyperparameters()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


@pytest.fixture(autouse=True)
def quietly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    for name, value in {"WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true", "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    yield
    import wandb

    wandb.finish()


def both(folder: Path, **options: Any) -> tuple[MLFlowLogger, WandbLogger]:
    """A logger of each kind in a folder; MLflow's on files, which are there at once."""
    uri = f"file:{folder / 'runs'}"
    return MLFlowLogger(tracking_uri=uri, **options), WandbLogger(save_dir=folder, offline=True, **options)


def whole_history(file: Path) -> list[dict[str, Any]]:
    """The rows in a file of W&B, once its service has written what is left."""
    sizes = [-1, file.stat().st_size]
    while sizes[-1] != sizes[-2] or sizes[-1] < 1000:
        time.sleep(0.3)
        sizes.append(file.stat().st_size)
    return list(read_history(file))


def points(logger: MLFlowLogger | WandbLogger, name: str) -> list[tuple[int, float]]:
    """All points of a curve, as the tracker has them, by step."""
    if isinstance(logger, MLFlowLogger):
        history = logger.experiment.get_metric_history(str(logger.run_id), name)
        return sorted((point.step, point.value) for point in history)
    import wandb

    wandb.finish()
    files = list(Path(logger.save_dir).glob(f"wandb/offline-run-*-{logger.version}/*.wandb"))
    rows = [row for file in files for row in whole_history(file)]
    return sorted((row["trainer/global_step"], row[name]) for row in rows if name in row)


def test_both_are_loggers_that_write_nothing_before_a_run(tmp_path: Path) -> None:
    default = MLFlowLogger(save_dir=tmp_path / "ml")
    for logger in (*both(tmp_path, prefix="p"), default):
        assert isinstance(logger, Logger)
        assert (logger.name, logger.version) == ("echelon_logs", None)
        assert pickle.loads(pickle.dumps(logger)).name == logger.name
    assert default.tracking_uri == f"sqlite:///{tmp_path}/ml/mlflow.db"
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_goes_on_from_an_earlier_checkpoint_is_one_curve(tmp_path: Path) -> None:
    whole = RecordingLogger(str(tmp_path / "whole"))
    torch.manual_seed(0)
    settings = {"log_every_n_steps": 1, "enable_checkpointing": True}
    quiet(tmp_path, logger=whole, max_epochs=4, **settings).fit(Logging(), loader())

    first = both(tmp_path)
    torch.manual_seed(0)
    saver = ModelCheckpoint(save_top_k=-1, every_n_epochs=1)
    quiet(tmp_path, logger=list(first), callbacks=[saver], max_epochs=3, **settings).fit(Logging(), loader())
    assert saver.dirpath == str(tmp_path / "runs" / "echelon_logs" / str(first[0].version) / "checkpoints")
    second_epoch = next(path for path in saver.best_k_models if "epoch=1-" in path)
    for logger in first:
        assert points(logger, "loss_step") == whole.series("loss_step")[:12]

    # what the run had logged after the checkpoint, four steps and an epoch, is computed again, and appears once
    resumed = both(tmp_path)
    torch.manual_seed(1)
    trainer = quiet(tmp_path, logger=list(resumed), max_epochs=4, **settings)
    trainer.fit(Logging(), loader(), ckpt_path=second_epoch)
    for before, logger in zip(first, resumed, strict=True):
        assert logger.version == before.version
        for name in ("loss_step", "loss_epoch"):
            assert points(logger, name) == whole.series(name)


def test_seeded_runs_have_names_of_their_own_and_draw_the_numbers_of_a_run_without_a_logger(tmp_path: Path) -> None:
    random.seed(1)
    unlogged = random.random()
    names = []
    for _ in range(2):
        random.seed(1)
        logger = MLFlowLogger("digits", save_dir=tmp_path)
        names.append(logger.experiment.get_run(str(logger.run_id)).info.run_name)
        assert random.random() == unlogged
        assert names[-1].endswith(f"-{str(logger.run_id)[:6]}")
    assert names[0] != names[1]


def test_the_database_of_the_default_store_holds_all_that_was_logged(tmp_path: Path) -> None:
    logger = MLFlowLogger("digits", "a name", save_dir=tmp_path, tags={"of": "me"}, log_model=True, prefix="p")
    saver = ModelCheckpoint(monitor="loss_epoch")
    trainer = quiet(
        tmp_path, logger=logger, callbacks=[saver], max_epochs=2, log_every_n_steps=2, enable_checkpointing=True
    )
    trainer.fit(Logging(), loader())
    logger.log_text("config", "seed: 1")
    logger.log_metrics({"/odd..(name)//x": float("nan"), "inf": float("inf")}, 3)
    with pytest.warns(UserWarning, match="keeps the first value of a hyper-parameter; this run keeps lr"):
        logger.log_hyperparams(argparse.Namespace(lr=0.5, new=None))
    logger.save()

    client = logger.experiment
    run = client.get_run(str(logger.run_id))
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "a name"
    assert run.data.tags["of"] == "me"
    act = "torch.nn.modules.activation.ReLU"
    assert run.data.params == {"lr": "0.1", "act": act, "betas": "[0.9, 0.99]", "new": "None"}
    assert [step for step, _ in points(logger, "p-loss_step")] == [2, 4, 6, 8]
    ((step, value),) = points(logger, "p-inf")
    assert step == 3 and is_same(float("inf"), value)
    assert is_same(float("nan"), points(logger, "p-odd..name/x")[0][1])
    kept = Path(saver.best_model_path)
    assert {item.path for item in client.list_artifacts(str(logger.run_id))} == {"config.txt", kept.stem}
    copied = client.list_artifacts(str(logger.run_id), f"{kept.stem}/{kept.name}")
    assert {Path(item.path).name for item in copied} == {path.name for path in kept.iterdir()}
    assert Path(logger.save_dir or "", "artifacts").is_dir()


def test_media_tables_and_hyper_parameters_reach_the_files_of_wandb(tmp_path: Path) -> None:
    logger = WandbLogger("a name", tmp_path, "mine", offline=True, project="digits", tags=["x"])
    assert (logger.name, logger.version) == ("digits", "mine")
    logger.log_hyperparams({"lr": torch.tensor(0.5), "act": torch.nn.ReLU})
    logger.log_image("sample", [torch.rand(3, 4, 4), torch.rand(4, 4).numpy()], step=2, caption=["a", "b"])
    logger.log_table("rows", ["x", "y"], [[1, "a"]])
    logger.log_text("words", ["text"], [["hello"]])
    logger.log_text("config", "seed: 1")
    logger.watch(Regression())
    with pytest.raises(ValueError, match="caption must have a value for each of 1 items, got 2"):
        logger.log_image("sample", [torch.rand(3, 4, 4)], caption=["a", "b"])
    with pytest.raises(TypeError, match=r"'sample' must be logged as a list, got Tensor; give \[it\]"):
        logger.log_image("sample", torch.rand(3, 4, 4))  # type: ignore[arg-type]
    config = logger.experiment.config
    assert (config["lr"], config["act"]) == (0.5, "torch.nn.modules.activation.ReLU")
    logger.experiment.finish()
    (file,) = tmp_path.glob("wandb/offline-run-*-mine/run-mine.wandb")
    rows = whole_history(file)
    media = [
        {name: row[f"{name}._type"] for name in ("sample", "rows", "words", "config") if f"{name}._type" in row}
        for row in rows
    ]
    assert media == [
        {"sample": "images/separated"},
        {"rows": "table-file"},
        {"words": "table-file"},
        {"config": "table-file"},
    ]
    assert rows[0]["trainer/global_step"] == 2


class KilledOnce(Callback):
    """Kills rank 0 after a step, in the first round."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        if trainer.is_global_zero and trainer.global_step == 6 and not self.mark.exists():
            self.mark.touch()
            for logger in trainer.loggers:
                logger.save()
            time.sleep(2)  # W&B's service writes to the disk twice a second
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.only_in_sweep
@pytest.mark.sweep
def test_a_launched_run_whose_rank_0_is_killed_is_one_curve(tmp_path: Path) -> None:
    loggers = both(tmp_path) if IS_SWEEP else both(tmp_path)[1:]  # each process imports MLflow for a second
    trainer = quiet(
        tmp_path,
        strategy=ElasticStrategy("ddp", snapshot_every=3),
        devices=2,
        logger=list(loggers),
        callbacks=[KilledOnce(tmp_path / "killed")],
        max_epochs=2,
        log_every_n_steps=1,
    )
    trainer.fit(Logging(), loader(16, 2))
    assert (tmp_path / "killed").exists()
    for logger in loggers:
        assert [step for step, _ in points(logger, "loss_step")] == list(range(1, 9))
    if isinstance(loggers[0], MLFlowLogger):
        assert points(loggers[0], "loss_step") == points(loggers[1], "loss_step")
        assert loggers[0].experiment.get_run(str(loggers[0].run_id)).info.status == "FINISHED"


class Refusing(Callback):
    """Takes the store's folder away after a step, and brings it back after a later one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.away = folder, folder.with_name("away")

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == 2:
            self.folder.rename(self.away)
            self.folder.touch()
            trainer.save_checkpoint(self.folder.with_name("a.ckpt"))
        if trainer.global_step == 6:
            self.folder.unlink()
            self.away.rename(self.folder)


def test_a_store_that_refuses_ends_no_run_and_gets_what_was_held_back(tmp_path: Path) -> None:
    logger, _ = both(tmp_path)
    logger.open()
    trainer = quiet(tmp_path, logger=logger, callbacks=[Refusing(tmp_path / "runs")], max_epochs=2, log_every_n_steps=1)
    with pytest.warns(UserWarning, match="MLFlowLogger cannot write .*; training continues"):
        trainer.fit(Logging(), loader())
    assert [step for step, _ in points(logger, "loss_step")] == list(range(1, 9))


def test_what_is_impossible_is_refused(tmp_path: Path) -> None:
    with raises(ConfigError, "log_model must be False with offline=True, got 'all'", "drop one of the two"):
        WandbLogger(offline=True, log_model="all")
    with raises(ConfigError, "log_model must be True, False or 'all', got 'some'"):
        MLFlowLogger(log_model="some")  # type: ignore[arg-type]
    with raises(ConfigError, "MLFlowLogger cannot use the store", "nowhere", "give another tracking_uri or run_id"):
        MLFlowLogger(tracking_uri=f"file:{tmp_path / 'runs'}", run_id="nowhere").open()
    with raises(ConfigError, "save_dir='s4://x' has the scheme 's4'"):
        WandbLogger(save_dir="s4://x", offline=True)
