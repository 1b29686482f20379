"""CSVLogger: the table on disk, its growing columns, and its continuation after a resume."""

from __future__ import annotations

import csv
import math
import multiprocessing
import pickle
from pathlib import Path

import pytest
import torch
import yaml

from echelon.callbacks.run import Logger
from echelon.common.errors import ConfigError
from echelon.strategies.cluster.environment import NODE_FOLDER
from echelon.trainer.loggers import CSVLogger
from echelon.trainer.loggers.base import VersionFolder


def _rows(logger: CSVLogger) -> list[dict[str, str]]:
    with (Path(logger.log_dir) / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_it_is_a_logger(tmp_path: Path) -> None:
    assert isinstance(CSVLogger(tmp_path), Logger)


def test_constructing_and_asking_for_the_folder_writes_nothing(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path / "logs")
    assert logger.log_dir == str(tmp_path / "logs" / "echelon_logs" / "version_0")
    assert (logger.name, logger.version, logger.save_dir) == ("echelon_logs", 0, str(tmp_path / "logs"))
    assert list(tmp_path.iterdir()) == []


def test_versions_count_up_and_leave_gaps_alone(tmp_path: Path) -> None:
    (tmp_path / "a" / "version_7").mkdir(parents=True)
    (tmp_path / "a" / "version_x").mkdir()
    assert CSVLogger(tmp_path, "a").version == 8


def test_two_loggers_that_saw_the_same_free_number_get_two_folders(tmp_path: Path) -> None:
    first, second = CSVLogger(tmp_path), CSVLogger(tmp_path)
    assert first.log_dir == second.log_dir
    first.log_hyperparams({"lr": 1})
    second.log_hyperparams({"lr": 2})
    assert (first.version, second.version) == (0, 1)
    assert yaml.safe_load((Path(first.log_dir) / "hparams.yaml").read_text()) == {"lr": 1}
    assert yaml.safe_load((Path(second.log_dir) / "hparams.yaml").read_text()) == {"lr": 2}


def _claim(save_dir: str) -> str:
    return str(VersionFolder(save_dir, "runs", None).claim())


def test_processes_that_start_at_once_never_share_a_folder(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        claimed = pool.map(_claim, [str(tmp_path)] * 24, chunksize=1)
    assert len(set(claimed)) == 24


def test_a_folder_with_a_version_given_is_continued(tmp_path: Path) -> None:
    for step in (1, 2):
        logger = CSVLogger(tmp_path, version="mine")
        logger.log_metrics({"loss": step / 2}, step)
        logger.finalize("success")
    assert [(row["step"], row["loss"]) for row in _rows(logger)] == [("1", "0.5"), ("2", "1.0")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "../up"}, "name='../up' must be a folder below save_dir; give a relative path"),
        ({"version": "/tmp/x"}, "version='/tmp/x' must be a folder below save_dir"),
        ({"flush_logs_every_n_steps": 0}, "flush_logs_every_n_steps must be at least 1, got 0"),
    ],
)
def test_impossible_arguments_are_refused(tmp_path: Path, arguments: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CSVLogger(tmp_path, **arguments)  # type: ignore[arg-type]


def test_rows_reach_the_file_every_so_many_steps_and_at_save(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=10)
    path = Path(logger.log_dir) / "metrics.csv"
    logger.log_metrics({"loss": 1.0}, 9)
    assert not path.exists()
    logger.log_metrics({"loss": 2.0}, 11)
    assert len(_rows(logger)) == 2
    logger.log_metrics({"loss": 3.0}, 12)
    assert len(_rows(logger)) == 2
    logger.save()
    assert [row["loss"] for row in _rows(logger)] == ["1.0", "2.0", "3.0"]


def test_a_metric_that_comes_later_adds_a_column_and_keeps_every_value_to_the_last_bit(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, prefix="run", flush_logs_every_n_steps=1)
    logger.log_metrics({"loss": 0.1 + 0.2}, 1)
    logger.log_metrics({"loss": math.inf, "acc, top 5": 0.5}, 2)
    logger.log_metrics({"acc, top 5": torch.tensor(0.25)}, 3)
    rows = _rows(logger)
    assert list(rows[0]) == ["step", "run-loss", "run-acc, top 5"]
    assert float(rows[0]["run-loss"]) == 0.1 + 0.2
    assert [row["run-loss"] for row in rows[1:]] == ["inf", ""]
    assert [row["run-acc, top 5"] for row in rows] == ["", "0.5", "0.25"]
    assert [path.name for path in Path(logger.log_dir).iterdir()] == ["metrics.csv"]


def test_a_resumed_run_has_no_gap_and_no_repeated_step(tmp_path: Path) -> None:
    killed = CSVLogger(tmp_path, version=0)
    for step in range(1, 8):
        killed.log_metrics({"loss": float(step)}, step)
    killed.save()
    resumed = CSVLogger(tmp_path, version=0)
    resumed.resume_at(4)
    for step in range(5, 10):
        resumed.log_metrics({"loss": float(step), "new": 0.0}, step)
    resumed.finalize("success")
    assert [(int(row["step"]), float(row["loss"])) for row in _rows(resumed)] == [(n, float(n)) for n in range(1, 10)]


def test_resuming_in_the_same_process_forgets_rows_that_were_not_yet_written(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    for step in (1, 2, 3):
        logger.log_metrics({"loss": 0.0}, step)
    logger.resume_at(2)
    logger.log_metrics({"loss": 1.0}, 3)
    logger.save()
    assert [(row["step"], row["loss"]) for row in _rows(logger)] == [("1", "0.0"), ("2", "0.0"), ("3", "1.0")]


def test_a_line_that_a_kill_left_unfinished_is_dropped(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, version=0)
    logger.log_metrics({"loss": 1.0, "acc": 2.0}, 1)
    logger.save()
    path = Path(logger.log_dir) / "metrics.csv"
    with path.open("a") as file:
        file.write("2,0.12")
    again = CSVLogger(tmp_path, version=0)
    again.resume_at(1)
    again.log_metrics({"loss": 3.0, "acc": 4.0}, 2)
    again.save()
    assert [tuple(row.values()) for row in _rows(again)] == [("1", "1.0", "2.0"), ("2", "3.0", "4.0")]


def test_a_save_dir_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write to '.*file/echelon_logs/version_0' \(Not a directory\); give"):
        CSVLogger(tmp_path / "file").open()


def test_resuming_where_nothing_was_logged_creates_nothing(tmp_path: Path) -> None:
    CSVLogger(tmp_path).resume_at(5)
    assert list(tmp_path.iterdir()) == []


def test_a_foreign_table_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "echelon_logs" / "version_0" / "metrics.csv"
    path.parent.mkdir(parents=True)
    path.write_text("name,age\nbob,3\n")
    logger = CSVLogger(tmp_path, version=0)
    logger.log_metrics({"loss": 1.0}, 1)
    with pytest.raises(
        ConfigError, match="must be a table of a CSVLogger, found the row .*bob.*; move it, or give another version"
    ):
        logger.save()
    assert path.read_text() == "name,age\nbob,3\n"


def test_hyper_parameters_of_two_calls_stand_in_one_file_and_metrics_become_a_row(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_hyperparams({"optimizer": {"betas": (0.9, 0.99)}, "act": torch.nn.ReLU, "path": Path("data")})
    logger.log_hyperparams({"lr": torch.tensor(0.5), "long": "x" * 501, "none": None}, {"hp/score": 0.0})
    logger.save()
    assert yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text()) == {
        "optimizer": {"betas": [0.9, 0.99]},
        "act": "torch.nn.modules.activation.ReLU",
        "path": "data",
        "lr": 0.5,
        "long": "x" * 501,
        "none": None,
    }
    assert _rows(logger) == [{"step": "0", "hp/score": "0.0"}]


def test_a_text_is_a_file_of_its_own(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_text("run/config", "seed: 1\n")
    logger.log_graph(torch.nn.Linear(1, 1), torch.ones(1, 1))
    assert {path.name: path.read_text() for path in Path(logger.log_dir).iterdir()} == {"run_config.txt": "seed: 1\n"}


def test_a_value_that_is_no_number_is_refused_at_the_call(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="high"):
        CSVLogger(tmp_path).log_metrics({"loss": "high"}, 1)  # type: ignore[dict-item]


def test_it_travels_to_another_process_with_its_folder(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_hyperparams({})
    copy = pickle.loads(pickle.dumps(logger))
    copy.log_metrics({"loss": 1.0}, 1)
    copy.save()
    assert copy.log_dir == logger.log_dir
    assert len(_rows(logger)) == 1


def test_workers_that_were_lost_and_live_add_nothing_to_the_table_of_the_next_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NODE_FOLDER, str(tmp_path))  # as in a worker of an elastic run
    lost, following = CSVLogger(tmp_path, version=0), CSVLogger(tmp_path, version=0)
    lost.open()
    for step in (1, 2):
        lost.log_metrics({"loss": 0.5}, step)
    lost.save()
    lost.log_metrics({"loss": 0.5}, 3)  # while the node is stopped, for example
    following.open()
    following.resume_at(2)
    with pytest.warns(UserWarning, match="metrics.csv has been written by another process"):
        lost.finalize("failed")
    following.log_metrics({"loss": 0.5}, 3)
    following.save()
    lost.log_metrics({"loss": 0.5}, 4)
    lost.finalize("failed")
    following.finalize("success")
    assert [row["step"] for row in _rows(following)] == ["1", "2", "3"]


def test_workers_that_were_lost_before_they_had_a_table_do_not_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NODE_FOLDER, str(tmp_path))
    lost, following = CSVLogger(tmp_path, version=0), CSVLogger(tmp_path, version=0)
    lost.open()
    lost.log_metrics({"loss": 0.5}, 1)
    following.open()
    following.resume_at(0)
    with pytest.warns(UserWarning, match="metrics.csv has been written by another process"):
        lost.finalize("failed")
    following.log_metrics({"loss": 0.5}, 1)
    following.finalize("success")
    assert [row["step"] for row in _rows(following)] == ["1"]
