"""StragglerMonitor: where a step's time goes on each rank, which rank is slow, and why."""

from __future__ import annotations

import csv
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended_cuda import PretendedCuda
from recording_logger import RecordingLogger
from scripted import Scripted, batches, trainer_in
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from echelon import CSVLogger, Trainer, TrainModule
from echelon.callbacks import LambdaCallback
from echelon.callbacks.helpers.step_clock import StepClock, StepTimes
from echelon.callbacks.helpers.stragglers import Straggler, Suspicion, find_straggler, mean_steps, split_compute
from echelon.callbacks.straggler_monitor import StragglerMonitor, metrics_of_ranks
from echelon.common.errors import ConfigError
from echelon.testing import run_ranks

SLOW = 0.1
"""Seconds; a step takes a hundredth of it."""

Rows = dict[int, dict[str, float]]


def is_rank(rank: int) -> bool:
    return int(os.environ["RANK"]) == rank


class Samples(Dataset[Any]):
    """Ones; rank 1 gets those of some steps late."""

    def __init__(self, num_ranks: int, num_steps: int, late: range) -> None:
        self.num_ranks, self.num_steps, self.late = num_ranks, num_steps, late

    def __len__(self) -> int:
        return self.num_ranks * self.num_steps

    def __getitem__(self, index: int) -> Tensor:
        if is_rank(1) and index // self.num_ranks + 1 in self.late:
            time.sleep(SLOW)
        return torch.ones(2)


class Slow(TrainModule):
    """Rank 1 is slow in the forward of some steps, and rank 0 in the backward of others."""

    def __init__(self, forward: range, backward: range) -> None:
        super().__init__()
        self.layer: Any = nn.Linear(2, 1)
        self.slow_forward, self.slow_backward = forward, backward

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if is_rank(1) and self.global_step + 1 in self.slow_forward:
            time.sleep(SLOW)
        hidden = self.layer(batch)
        if is_rank(0) and self.global_step + 1 in self.slow_backward:
            hidden.register_hook(burn)
        loss: Tensor = hidden.sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def burn(gradient: Tensor) -> Tensor:
    """Keep the CPU busy for a while."""
    end = time.thread_time() + SLOW
    while time.thread_time() < end:
        torch.ones(100).sum()
    return gradient


class Keeping(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def train_three_ranks(folder: Path) -> list[str]:
    """Train 12 steps and report each: 2 to 4 are slow in forward, 5 to 8 in data, 9 to 11 in backward."""
    kept, logger = Keeping(), logging.getLogger("echelon.callbacks.straggler_monitor")
    logger.addHandler(kept)
    Trainer(
        accelerator="cpu",
        devices=3,
        strategy="ddp",
        max_epochs=1,
        logger=CSVLogger(folder, version=0),
        log_every_n_steps=1,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[StragglerMonitor(patience=2)],
    ).fit(Slow(range(2, 5), range(9, 12)), DataLoader(Samples(3, 12, range(5, 9)), batch_size=1))
    logger.removeHandler(kept)
    return kept.messages


@pytest.fixture(scope="module")
def of_three_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[str]], Rows]:
    """The text that each rank logged, and the metrics of each step."""
    folder = tmp_path_factory.mktemp("stragglers")
    messages = run_ranks(train_three_ranks, 3, folder)
    with (folder / "echelon_logs" / "version_0" / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["time/compute/rank_0"]]
    return messages, {int(row["step"]): {name: float(value) for name, value in row.items() if value} for row in rows}


def test_every_step_but_the_first_is_split_for_each_rank(of_three_ranks: tuple[list[list[str]], Rows]) -> None:
    _, rows = of_three_ranks
    assert list(rows) == list(range(2, 13))
    for row in rows.values():
        names = {name for name in row if name.startswith("time/")}
        parts = ("compute", "communication_wait", "data_wait")
        assert names == {f"time/{part}/rank_{rank}" for part in parts for rank in range(3)}
        assert all(row[name] >= 0 for name in names)


@pytest.mark.parametrize(
    ("steps", "part", "rank"),
    [(range(2, 5), "compute", 1), (range(5, 9), "data_wait", 1), (range(9, 12), "compute", 0)],
    ids=["forward", "data", "backward"],
)
def test_what_takes_long_is_booked_where_it_belongs(
    of_three_ranks: tuple[list[list[str]], Rows], steps: range, part: str, rank: int
) -> None:
    for step in steps:
        row = of_three_ranks[1][step]
        assert row[f"time/{part}/rank_{rank}"] >= 0.99 * SLOW
        assert row["stragglers/slowest_rank"] == rank
        for other in {0, 1, 2} - {rank}:  # they wait for it in backward
            assert row[f"time/communication_wait/rank_{other}"] > row[f"time/communication_wait/rank_{rank}"]


def test_the_slow_rank_is_named_with_the_reason_and_again_when_that_changes(
    of_three_ranks: tuple[list[list[str]], Rows],
) -> None:
    messages = of_three_ranks[0]
    assert messages[1:] == [[], []]
    first, second, third = messages[0]
    for message, rank, cause in ((first, 1, "compute"), (second, 1, "data wait"), (third, 0, "compute")):
        assert f"Rank {rank} (node 0, host " in message
        assert f"its {cause} is too long" in message
        assert all(f"{part} " in message for part in ("compute", "communication wait", "data wait"))


def test_one_process_is_split_and_not_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = RecordingLogger(str(tmp_path))
    monitor = StragglerMonitor(2, threshold=1.01, patience=1)
    slow = LambdaCallback(on_before_optimizer_step=lambda *_: time.sleep(0.01))
    trainer = trainer_in(tmp_path, monitor, slow, logger=logger, max_epochs=2, val_check_interval=2)
    trainer.fit(Scripted(), batches(), batches(4))
    assert [step for step, _ in logger.series("time/compute/rank_0")] == [2, 4, 6, 8]
    assert all(seconds >= 0.01 for _, seconds in logger.series("time/compute/rank_0"))
    assert all(seconds == 0 for _, seconds in logger.series("time/communication_wait/rank_0"))
    assert not logger.names("stragglers/")
    assert not caplog.records


@pytest.mark.parametrize("is_first", [True, False])
def test_validations_and_checkpoints_are_no_part_of_a_step(tmp_path: Path, is_first: bool) -> None:
    def save(trainer: Any, module: Any) -> None:
        if trainer.global_step % 2:
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    def pause(*_: Any) -> None:
        time.sleep(SLOW)

    saving = LambdaCallback(on_train_step_end=save)
    pausing = LambdaCallback(on_validation_batch_start=pause, on_save_checkpoint=pause)
    callbacks = [StragglerMonitor(), saving] if is_first else [saving, StragglerMonitor()]
    logger = RecordingLogger(str(tmp_path))
    settings = {"logger": logger, "max_epochs": 2, "val_check_interval": 2, "log_every_n_steps": 1}
    trainer_in(tmp_path, *callbacks, pausing, **settings).fit(Scripted(), batches(), batches(2))
    assert len(logger.series("time/compute/rank_0")) == 7
    for part in ("compute", "data_wait"):
        assert max(seconds for _, seconds in logger.series(f"time/{part}/rank_0")) < SLOW


def test_the_micro_batches_of_a_step_add_up(tmp_path: Path) -> None:
    logger = RecordingLogger(str(tmp_path))
    slow = LambdaCallback(on_before_backward=lambda *_: time.sleep(0.02))
    settings = {"logger": logger, "max_epochs": 1, "log_every_n_steps": 1, "accumulate_grad_batches": 2}
    trainer_in(tmp_path, slow, StragglerMonitor(), **settings).fit(Scripted(), batches())
    assert [seconds >= 2 * 0.02 for _, seconds in logger.series("time/compute/rank_0")] == [True]


@pytest.mark.gpu
def test_on_a_gpu_one_step_in_some_is_measured(tmp_path: Path) -> None:
    logger = RecordingLogger(str(tmp_path))
    monitor = StragglerMonitor(1, sample_every=2)
    trainer_in(tmp_path, monitor, logger=logger, max_epochs=2, accelerator="gpu").fit(Scripted(), batches())
    reports = logger.series("time/compute/rank_0")  # a step that the GPU has not completed comes later, or with others
    assert 1 <= len(reports) <= 3
    assert all(step >= 3 and seconds > 0 for step, seconds in reports)
    assert {seconds for _, seconds in logger.series("time/communication_wait/rank_0")} == {0.0}


# --- the arithmetic --------------------------------------------------------------------------------------------------


def test_where_ranks_meet_what_takes_no_processor_time_is_waiting() -> None:
    clock = StepClock(torch.device("cpu"), meets=True, meets_in_forward=True)
    clock.start()
    time.sleep(0.02)
    clock.begin_micro_batch()
    time.sleep(0.03)
    clock.begin_backward()
    burn(torch.ones(1))
    clock.end()
    compute, communication_wait, data_wait, num_steps = clock.take()
    assert compute >= 0.99 * SLOW
    assert communication_wait >= 0.02
    assert data_wait >= 0.02
    assert num_steps == 1
    assert clock.take() == (0, 0, 0, 0)


def test_a_step_that_was_not_started_or_had_no_batch_is_not_counted() -> None:
    clock = StepClock(torch.device("cpu"), meets=False, meets_in_forward=False)
    clock.begin_micro_batch()
    clock.begin_backward()
    clock.end()
    clock.start()
    clock.end()
    assert clock.take() == (0, 0, 0, 0)


def device_step(clock: StepClock, cuda: PretendedCuda, data: float, forward: float, backward: float) -> None:
    """Mark one step of two micro-batches, each with these milliseconds on the device."""
    clock.start()
    for _ in range(2):
        cuda.now += data
        clock.begin_micro_batch()
        cuda.now += forward
        clock.begin_backward()
        cuda.now += backward
        data = 0
    clock.end()


def test_on_a_gpu_marks_are_events_that_are_read_once_the_device_has_come_to_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = PretendedCuda().install(monkeypatch)
    clock = StepClock(torch.device("cuda", 0), meets=True, meets_in_forward=False)
    cuda.completed = 0.0
    device_step(clock, cuda, 1.0, 20.0, 300.0)
    assert clock.take() == (0, 0, 0, 0)
    cuda.completed = cuda.now
    device_step(clock, cuda, 2.0, 30.0, 400.0)
    assert clock.take() == pytest.approx((0.04, 0.6, 0.001, 1))
    clock.start()
    clock.interrupt()  # a validation
    cuda.now += 5000.0
    clock.begin_micro_batch()
    cuda.now += 7.0
    clock.interrupt()  # the end of the epoch
    clock.start()
    clock.end()
    cuda.completed = cuda.now
    assert clock.take() == pytest.approx((0.06 + 0.007, 0.8, 0.002, 2))
    assert clock.take() == (0, 0, 0, 0)
    assert {kind for kind, *_ in cuda.log} == {"record"}


def test_the_slowest_rank_is_compared_with_the_median_of_the_others() -> None:
    ranks = mean_steps([StepTimes(2, 8, 0, 2), StepTimes(8, 0, 2, 2), StepTimes(0, 0, 0, 0), StepTimes(3, 3, 9, 3)])
    assert ranks == {0: (1, 4, 0, 2), 1: (4, 0, 1, 2), 3: (1, 1, 3, 3)}
    found = find_straggler(ranks)
    assert found == (1, 5 / 2.5, "compute")
    assert find_straggler(ranks | {0: StepTimes(1, 0, 9, 2)}) == (0, 10 / 4.5, "data_wait")
    assert find_straggler({0: ranks[0]}) is None
    assert find_straggler({}) is None


@pytest.mark.parametrize(
    ("reports", "told"),
    [
        ("1c 1c 1c 1c 1c", "2"),  # once
        ("1c 1c -- 1c 1c 1c", "5"),  # in a row
        ("1c 1c 2c 1c 1c 1c", "5"),
        ("1c 1c 1c 2c 2c 2c 1c 1c 1c", "2 5 8"),  # another rank
        ("1c 1c 1c 1d 1c 1d 1d 1d 1d", "2 7"),  # another reason, which lasts
        ("1c 1d 1c 1d 1c 1d", "2"),  # one that does not
        ("1c 1c 1c -- 1c 1c 1c", "2"),  # it had barely ended
        ("1c 1c 1c -- -- -- 1c 1c 1c", "2 8"),
    ],
)
def test_a_rank_is_named_after_some_reports_and_again_when_it_changes(reports: str, told: str) -> None:
    suspicion = Suspicion(threshold=1.25, patience=3)
    found = [
        Straggler(0, 1.2, "compute")
        if report == "--"
        else Straggler(int(report[0]), 1.3, "compute" if report[1] == "c" else "data_wait")
        for report in reports.split()
    ]
    assert [index for index, one in enumerate(found) if suspicion.should_warn(one)] == [int(i) for i in told.split()]


def test_the_rank_that_waits_least_is_the_one_that_is_waited_for() -> None:
    ranks = {0: StepTimes(1, 5, 0, 1), 1: StepTimes(4, 2, 0, 1)}
    assert split_compute(ranks) == {0: (3, 3, 0, 1), 1: (6, 0, 0, 1)}
    assert split_compute({}) == {}


def test_many_ranks_are_summed_up() -> None:
    ranks = {rank: StepTimes(rank, 0, 1, 1) for rank in range(17)}
    assert metrics_of_ranks(ranks) == {
        f"time/{part}/{name}": value
        for part, values in {"compute": (0, 8, 16), "communication_wait": (0, 0, 0), "data_wait": (1, 1, 1)}.items()
        for name, value in zip(("min", "median", "max"), values, strict=True)
    }
    assert len(metrics_of_ranks({rank: ranks[rank] for rank in range(16)})) == 3 * 16


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps must be >= 1, got 0"),
        ({"patience": 0}, "patience must be >= 1, got 0"),
        ({"sample_every": -1}, "sample_every must be >= 1, got -1"),
        ({"threshold": 1.0}, "threshold must be > 1, got 1.0"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StragglerMonitor(**settings)
