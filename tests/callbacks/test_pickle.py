"""Callbacks and loggers are sent to the processes of a run, before and after other runs, and still work on return."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from scripted import Scripted, batches, trainer_in
from terminal import terminal

from echelon import Chaos, CSVLogger, TensorBoardLogger
from echelon.callbacks import (
    BasePredictionWriter,
    Callback,
    ChaosMonkey,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GoodputMonitor,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    LossSpikePolicy,
    MemoryReport,
    ModelCheckpoint,
    ModelSummary,
    NaNGuard,
    OmitFrozenWeights,
    OnExceptionCheckpoint,
    SampleLedger,
    StochasticWeightAveraging,
    StragglerMonitor,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)


def every_callback() -> list[Callback]:
    return [
        TQDMProgressBar(),
        BasePredictionWriter(),
        ChaosMonkey(Chaos("kill:rank=5@step=1"), marks="nowhere"),
        DeviceStatsMonitor(),
        EarlyStopping("val_loss", patience=9),
        EMAWeightAveraging(decay=0.5),
        GoodputMonitor(),
        GradientAccumulationScheduler({0: 2}),
        LambdaCallback(on_fit_end=lambda trainer, module: None),
        LearningRateMonitor(),
        LossSpikePolicy(),
        MemoryReport(),
        ModelSummary(),
        NaNGuard(),
        OmitFrozenWeights(),
        OnExceptionCheckpoint("nowhere"),
        StragglerMonitor(),
        SampleLedger(),
        StochasticWeightAveraging(0.1, swa_epoch_start=1),
        ThroughputMonitor(length_fn=len),
        Timer(),
        ModelCheckpoint(monitor="val_loss"),
    ]


def travelled(thing: Any) -> Any:
    return cloudpickle.loads(cloudpickle.dumps(thing))


def fit(folder: Path, callbacks: list[Callback], logger: Any, **settings: Any) -> Any:
    trainer = trainer_in(
        folder, *callbacks, logger=logger, log_every_n_steps=1, max_epochs=2, enable_progress_bar=True,
        enable_model_summary=True, **settings
    )  # fmt: skip
    trainer.fit(Scripted([0.3, 0.2]), batches(), batches(4))
    return trainer


def test_the_list_names_every_callback() -> None:
    """All but those that need another module or are separate; their own tests send them."""
    from echelon import callbacks

    exported = [getattr(callbacks, name) for name in callbacks.__all__]
    ours = {kind for kind in exported if isinstance(kind, type) and issubclass(kind, Callback)}
    missing = ours - {type(callback) for callback in every_callback()}
    names = {kind.__name__ for kind in missing}
    abstract = {"Callback", "WeightAveraging", "BaseFinetuning", "ProgressDisplay"}
    alone = {"BackboneFinetuning", "BatchSizeFinder", "LearningRateFinder", "RichProgressBar", "Timeline"}
    alone |= {"ExpertBalance", "HuggingFaceCheckpoint"}
    assert names == {*abstract, *alone}, "add the others to `every_callback`, above"


def test_callbacks_travel_before_and_after_a_run_with_what_they_have_seen(tmp_path: Path) -> None:
    first = travelled(every_callback())
    logger = CSVLogger(tmp_path / "logs")  # which LearningRateMonitor asks for
    fit(tmp_path, first, logger)
    second = travelled(first)
    for one, other in zip(first, second, strict=True):
        ours, theirs = one.state_dict(), other.state_dict()
        assert repr(ours) == repr(theirs)
    assert second[-1].best_model_path == first[-1].best_model_path
    trainer = fit(tmp_path, second, logger)
    assert trainer.global_step == 4
    (rates,) = (one for one in second if isinstance(one, LearningRateMonitor))
    assert rates.lrs == {"lr-SGD": [0.1, 0.1]}


def test_open_bars_and_a_counting_stay_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class InTheMiddle(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.extend(travelled([bar, throughput]))

    bar = TQDMProgressBar()
    throughput = ThroughputMonitor(available_flops=1e12)
    with terminal(monkeypatch):
        fit(tmp_path, [bar, InTheMiddle(), throughput], False)
    assert len(seen) == 2 * 8


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_loggers_travel_with_their_folder_and_without_open_files(tmp_path: Path, kind: Any) -> None:
    logger = kind(tmp_path)
    fit(tmp_path, [], travelled(logger))
    logger.continue_as(0)
    assert logger.version == 0
    logger.log_metrics({"own": 1.0}, 1)
    fit(tmp_path, [], travelled(logger))
    logger.save()
    assert [path.name for path in (tmp_path / "echelon_logs").iterdir()] == ["version_0"]


def test_a_table_is_continued_that_another_process_has_widened(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"a": 1.0}, 1)
    logger.save()
    other = travelled(logger)
    other.log_metrics({"b": 2.0}, 2)
    other.save()
    logger.continue_as(other.version)
    logger.log_metrics({"a": 3.0}, 3)
    logger.save()
    with (Path(logger.log_dir) / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["a"], row["b"]) for row in rows] == [("1", "1.0", ""), ("2", "", "2.0"), ("3", "3.0", "")]


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_a_silent_logger_writes_nothing_whoever_uses_it(tmp_path: Path, kind: Any) -> None:
    logger = kind(tmp_path)
    logger.silence()
    logger.log_metrics({"x": 1.0}, 1)
    logger.log_hyperparams({"lr": 0.1})
    logger.log_text("config", "x: 1")
    if kind is TensorBoardLogger:
        logger.experiment.add_scalar("x", 1.0, 1)
    logger.save()
    logger.finalize("success")
    assert list(tmp_path.iterdir()) == []
