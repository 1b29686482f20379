"""Third-party loggers: one written for Lightning, a minimal one, and the dummy one."""

from __future__ import annotations

import argparse
import csv
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from small import Regression, loader, quiet, raises

from echelon import ConfigError, CSVLogger, Logger, TensorBoardLogger
from echelon.callbacks.helpers.loggers import run_folder
from echelon.trainer.loggers import DummyLogger


class WrittenForLightning:
    """A logger as in Lightning's documentation, with the defaults of its base class; notes how it is called."""

    save_dir = None
    log_dir = None

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    @property
    def name(self) -> str:
        return "MyLogger"

    @property
    def version(self) -> str:
        return "0.1"

    def log_hyperparams(self, params: Any) -> None:
        self.calls.append(("log_hyperparams", dict(params)))

    def log_metrics(self, metrics: Any, step: int) -> None:
        self.calls.append(("log_metrics", step, sorted(metrics)))

    def save(self) -> None:
        self.calls.append(("save",))

    def finalize(self, status: str) -> None:
        self.calls.append(("finalize", status))


class Least:
    """The four names that a logger must have."""

    name = None
    version = None

    def __init__(self) -> None:
        self.steps: list[int] = []

    def log_metrics(self, metrics: Any, step: int) -> None:
        self.steps.append(step)

    def log_hyperparams(self, params: Any) -> None:
        raise AssertionError("there are none")


class WithHyperparameters(Regression):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.save_hyperparameters()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def test_a_logger_written_for_lightning_is_called_as_there(tmp_path: Path) -> None:
    logger = WrittenForLightning()
    trainer = quiet(tmp_path, max_epochs=1, logger=logger, log_every_n_steps=2, enable_checkpointing=True)
    trainer.fit(WithHyperparameters(), loader(8, 2))
    calls = [call for call in logger.calls if call != ("save",)]
    assert calls == [
        ("log_hyperparams", {"lr": 0.1}),
        ("log_metrics", 2, ["epoch", "loss"]),
        ("log_metrics", 4, ["epoch", "loss"]),
        ("finalize", "success"),
    ]
    # Lightning 2.6.6 has its checkpoint at MyLogger/0.1/checkpoints/epoch=0-step=4.ckpt below default_root_dir, too
    assert trainer.log_dir == str(tmp_path / "MyLogger" / "0.1")
    assert (tmp_path / "MyLogger" / "0.1" / "checkpoints" / "epoch=0-step=4.ckpt").exists()


def test_four_names_make_a_logger(tmp_path: Path) -> None:
    logger = Least()
    assert isinstance(logger, Logger)
    trainer = quiet(tmp_path, max_epochs=1, logger=[logger, Least()], log_every_n_steps=1, enable_progress_bar=True)

    class Logging(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", 1.0)
            return super().training_step(batch, batch_idx)

    trainer.fit(Logging(), loader(4, 2))
    assert logger.steps == [1, 2]
    assert trainer.log_dir == str(tmp_path / "version_None")


@pytest.mark.parametrize("as_list", [False, True])
def test_a_logger_that_lacks_a_method_is_refused_by_its_name(as_list: bool) -> None:
    class Half:
        name = "half"
        version = 0

        def log_metrics(self, metrics: Any, step: int) -> None: ...

    with raises(ConfigError, "a Half without log_hyperparams;", "define these"):
        quiet(logger=[Half()] if as_list else Half())
    trainer = quiet()
    with raises(ConfigError, "a Half without log_hyperparams;"):
        trainer.loggers = [Half()]


def test_a_dummy_logger_takes_every_call_and_travels() -> None:
    logger = pickle.loads(pickle.dumps(DummyLogger()))
    logger.experiment.add_image("a", 1)
    logger[0].experiment.anything()
    logger.watch("model", log="all")
    logger.log_metrics({"a": 1.0}, 3)
    assert isinstance(logger, Logger)
    assert (logger.name, logger.version, logger.log_dir) == ("", "", None)
    assert run_folder(logger, "root") == Path("root")
    quiet(max_epochs=1, logger=logger, log_every_n_steps=1).fit(WithHyperparameters(), loader(4, 2))


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_folders_are_named_as_in_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    logger = kind("~/logs", name=None, version="a")
    logger.log_metrics({"x": 1.0}, 1)
    logger.save()
    assert (logger.name, logger.save_dir, logger.root_dir) == ("", str(tmp_path / "logs"), str(tmp_path / "logs"))
    assert logger.log_dir == str(tmp_path / "logs" / "a")
    assert Path(logger.log_dir).is_dir()
    assert kind("b", name="n").root_dir == str(Path("b") / "n")


def test_the_folder_inside_a_version_is_known(tmp_path: Path) -> None:
    assert TensorBoardLogger(tmp_path, sub_dir="train").sub_dir == "train"
    assert TensorBoardLogger(tmp_path).sub_dir is None


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_a_namespace_of_hyper_parameters_is_logged(tmp_path: Path, kind: Any) -> None:
    logger = kind(tmp_path)
    logger.log_hyperparams(argparse.Namespace(lr=0.1, layers=[1, 2]))
    written = yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text())
    assert written == {"lr": 0.1, "layers": [1, 2]}


def test_rows_without_a_step_are_counted(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    for value in (0.5, 0.25):
        logger.experiment.log_metrics({"x": value})
    logger.save()
    with (Path(logger.log_dir) / "metrics.csv").open(newline="") as file:
        # Lightning 2.6.6: the same steps
        assert [(row["step"], row["x"]) for row in csv.DictReader(file)] == [("0", "0.5"), ("1", "0.25")]
    TensorBoardLogger(tmp_path).log_metrics({"x": 1.0})
