"""GoodputMonitor: the ledgers of real fits that are killed, resumed, failed and undisturbed."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from programs import WatchedProgram, run_program
from recording_logger import RecordingLogger
from scripted import Scripted, batches, trainer_in

from echelon import CSVLogger, ModelCheckpoint
from echelon.callbacks import LambdaCallback
from echelon.callbacks.goodput.ledger import CATEGORIES, EndRecord, Ledger, LedgerFile, read_ledger
from echelon.callbacks.goodput.spans import Goodput, account_for_time
from echelon.callbacks.goodput_monitor import GoodputMonitor
from echelon.common.errors import ConfigError
from echelon.strategies.resilience.rounds import RoundEnd

S = 1_000_000
SHARES = [f"goodput/{category}" for category in CATEGORIES]
PROGRAM = Path(__file__).with_name("goodput_run.py")


def account_of(folder: Path) -> Goodput:
    """The account of a folder's ledger, which counts each moment once."""
    goodput = account_for_time(read_ledger(folder / "goodput.jsonl"))
    assert sum(goodput.micros.values()) == goodput.total
    assert min(goodput.micros.values()) >= 0
    return goodput


def fit(folder: Path, *callbacks: Any, **settings: Any) -> Goodput:
    """Eight steps in two epochs, each with a validation, and their account: every step is written down."""
    trainer = trainer_in(folder, GoodputMonitor(0.0), *callbacks, **{"max_epochs": 2, **settings})
    trainer.fit(Scripted(), batches(), batches(4))
    return account_of(folder)


def pause(seconds: float = 0.05) -> Callable[..., None]:
    return lambda *_: time.sleep(seconds)


class Slow:
    """A loader that takes its time; it has a length, as an epoch without one that takes seconds is warned of."""

    def __len__(self) -> int:
        return len(batches())

    def __iter__(self) -> Iterator[Any]:
        for one in batches():
            time.sleep(0.02)
            yield one


# --- restarts ---


def test_a_killed_run_that_is_resumed_tells_which_steps_were_redone(tmp_path: Path) -> None:
    folder = tmp_path / "csv" / "version_0"
    began = time.time()
    run = WatchedProgram([PROGRAM, tmp_path, "13"], folder=tmp_path)
    assert run.readline() == "waiting\n"
    while not (folder / "checkpoints" / "epoch=2-step=10.ckpt").is_dir():
        time.sleep(0.01)  # it is written in the background
    run.close()
    killed = time.time()
    assert run.returncode == -signal.SIGKILL
    assert account_of(folder).rounds[0].last_step == 13
    assert read_ledger(folder / "goodput.jsonl").rounds[0].end is None

    assert run_program(PROGRAM, tmp_path, folder=tmp_path).returncode == 0
    goodput = account_of(folder)
    assert [(one.first_step, one.last_step, one.lost_steps, one.end) for one in goodput.rounds] == [
        (0, 13, 3, "killed"),
        (10, 20, 0, "finished"),
    ]
    assert (goodput.kept_steps, goodput.lost_steps) == (20, 3)
    assert goodput.num_skipped == 0
    # wall-clock time, from the start of the first process to the last record
    first, second = read_ledger(folder / "goodput.jsonl").rounds
    assert second.end is not None
    assert goodput.total == second.end.time - first.start.process_start
    assert began * S - S < first.start.process_start < first.start.time < killed * S
    assert killed * S - S < second.start.process_start
    assert goodput.micros["redone"] > 0
    assert goodput.micros["down"] > 0


def test_two_fits_in_one_folder_go_on_in_one_ledger(tmp_path: Path) -> None:
    for epochs, ckpt_path in ((2, None), (3, "last"), (1, None)):
        saving = ModelCheckpoint(tmp_path / "checkpoints")
        trainer = trainer_in(tmp_path, GoodputMonitor(), saving, max_epochs=epochs)
        trainer.fit(Scripted(), batches(), ckpt_path=ckpt_path)
    goodput = account_of(tmp_path)
    assert [(one.first_step, one.last_step, one.lost_steps, one.end) for one in goodput.rounds] == [
        (0, 8, 0, "finished"),
        (8, 12, 0, "finished"),
        (0, 4, 0, "finished"),
    ]
    # time that this process spent before its second fit is not start-up
    assert [one.micros["down"] > 0 for one in goodput.rounds] == [False, True, True]
    assert read_ledger(tmp_path / "goodput.jsonl").rounds[1].start.is_resumed


def test_one_monitor_can_watch_several_fits(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, GoodputMonitor(), max_epochs=1)
    trainer.fit(Scripted(), batches())
    trainer.fit(Scripted(), batches())
    assert account_of(tmp_path).kept_steps == 8


@pytest.mark.parametrize("is_first", [True, False])
def test_a_run_that_rolls_back_loses_the_steps_since_the_checkpoint(tmp_path: Path, is_first: bool) -> None:
    rolled = []

    def roll_back(trainer: Any, module: Any) -> None:
        if trainer.global_step == 7 and not rolled:
            rolled.append(trainer.roll_back())

    going_back = LambdaCallback(on_train_step_end=roll_back)
    around = (going_back, GoodputMonitor(0.0)) if is_first else (GoodputMonitor(0.0), going_back)
    saving = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=4)
    trainer_in(tmp_path, *around, saving, max_epochs=3).fit(Scripted(), batches())
    goodput = account_of(tmp_path)
    assert (goodput.kept_steps, goodput.lost_steps) == (12 - 3, 3)
    assert goodput.rounds[0].last_step == 12 - 3


def test_an_elastic_round_has_its_number_and_tells_how_the_earlier_ones_ended(tmp_path: Path) -> None:
    for number in range(3):
        ends = [RoundEnd(one, time.time(), "failure", f"end {one}", rank=one, step=4) for one in range(number)]
        monitor = GoodputMonitor(0.0, round_of=lambda number=number, ends=ends: (number, ends))  # type: ignore[misc]
        trainer = trainer_in(tmp_path, monitor, LambdaCallback(on_train_epoch_end=lambda *_: 1 // 0), max_epochs=1)
        with pytest.raises(ZeroDivisionError):
            trainer.fit(Scripted(), batches())
        path = tmp_path / "goodput.jsonl"  # as if it had been killed
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    starts = [one.start for one in read_ledger(tmp_path / "goodput.jsonl").rounds]
    assert [(one.round, [end.cause for end in one.ends]) for one in starts] == [
        (0, []),
        (1, ["end 0"]),
        (2, ["end 0", "end 1"]),
    ]
    assert [one.end for one in account_of(tmp_path).rounds] == [
        "failure of rank 0",
        "failure of rank 1",
        "running or killed",
    ]


def test_what_the_workers_of_a_lost_node_write_late_is_not_part_of_the_next_round(tmp_path: Path) -> None:
    first, second = (GoodputMonitor(0.0, round_of=lambda number=number: (number, ())) for number in range(2))  # type: ignore[misc]
    trainer_in(tmp_path, first, max_epochs=1).fit(Scripted(), batches())
    lost = LedgerFile(tmp_path / "goodput.jsonl")  # as if a suspended process had it open

    def wake(*_: Any) -> None:
        lost.append(EndRecord(round(time.time() * S), "failed", "a peer was lost"))

    trainer_in(tmp_path, second, LambdaCallback(on_train_start=wake), max_epochs=1).fit(Scripted(), batches())
    lost.close()
    ledger = read_ledger(tmp_path / "goodput.jsonl")
    assert ledger.num_skipped == 0
    assert [one.end and one.end.status for one in ledger.rounds] == ["success", "success"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".goodput")] == []


# --- what takes the time ---


def test_waits_for_data_validations_and_checkpoints_are_told_apart(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=4)
    pauses = LambdaCallback(
        on_save_checkpoint=pause(), on_validation_batch_start=pause(0.02), on_train_batch_end=pause(0.01)
    )
    began = time.monotonic()
    trainer = trainer_in(tmp_path, GoodputMonitor(), saving, pauses, max_epochs=2)
    trainer.fit(Scripted(), Slow(), batches(4))
    took = (time.monotonic() - began) * S
    goodput = account_of(tmp_path)
    # the first step is part of the start-up; its time cannot count for the others
    assert goodput.micros["data_wait"] >= 7 * 0.02 * S
    assert goodput.micros["validation"] >= 2 * 2 * 0.02 * S
    assert goodput.micros["checkpoint"] >= 2 * 0.05 * S
    assert goodput.micros["productive"] >= 7 * 0.01 * S
    assert goodput.total - goodput.micros["start_up"] < took


@pytest.mark.parametrize("is_first", [True, False])
def test_a_checkpoint_is_no_wait_for_data_whoever_saves_it(tmp_path: Path, is_first: bool) -> None:
    def save(trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    saving = LambdaCallback(on_train_step_end=save, on_save_checkpoint=pause(0.02))
    around = (saving, GoodputMonitor(0.0)) if is_first else (GoodputMonitor(0.0), saving)
    trainer_in(tmp_path, *around, max_epochs=2).fit(Scripted(), batches())
    goodput = account_of(tmp_path)
    assert goodput.micros["checkpoint"] >= 8 * 0.02 * S
    for one in read_ledger(tmp_path / "goodput.jsonl").rounds[0].periods:
        assert sum(one.parts.values()) <= one.duration + 5  # each part is rounded


def test_the_first_step_is_part_of_the_start_up(tmp_path: Path) -> None:
    goodput = fit(tmp_path, LambdaCallback(on_sanity_check_start=pause(0.1)), num_sanity_val_steps=1)
    first = read_ledger(tmp_path / "goodput.jsonl").rounds[0]
    assert first.periods[0].parts["start_up"] == first.periods[0].duration >= 0.1 * S
    assert all("start_up" not in one.parts for one in first.periods[1:])
    assert goodput.rounds[0].end == "finished"


def test_an_error_is_told_and_the_step_that_it_cut_short_was_lost(tmp_path: Path) -> None:
    def fail(trainer: Any, *_: Any) -> None:
        if trainer.global_step == 6:
            time.sleep(0.05)
            raise RuntimeError("out of\nluck")

    with pytest.raises(RuntimeError, match="luck"):
        fit(tmp_path, LambdaCallback(on_before_backward=fail))
    goodput = account_of(tmp_path)
    assert (goodput.rounds[0].end, goodput.rounds[0].cause) == ("failed", "RuntimeError: out of luck")
    assert goodput.rounds[0].last_step == 6
    assert goodput.micros["redone"] >= 0.05 * S


def test_an_interrupted_run_says_so(tmp_path: Path) -> None:
    def interrupt(trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        fit(tmp_path, LambdaCallback(on_train_batch_end=interrupt))
    end = read_ledger(tmp_path / "goodput.jsonl").rounds[0].end
    assert isinstance(end, EndRecord)
    assert end.status == "interrupted"
    assert account_of(tmp_path).kept_steps == 3


# --- where it is told ---


def test_the_loggers_get_shares_that_add_up_and_a_table(tmp_path: Path) -> None:
    logger = RecordingLogger(str(tmp_path))
    tables = CSVLogger(tmp_path, "csv")
    fit(tmp_path, logger=[logger, tables])
    assert logger.names("goodput/") == {"goodput/goodput", *SHARES}
    steps = [step for step, _ in logger.series("goodput/goodput")]
    assert steps == [*range(2, 9), 8]
    last = {name: value for name, value in logger.records[-1][1].items() if name in SHARES}
    assert sum(last.values()) == pytest.approx(1)
    (only,) = read_ledger(tmp_path / "goodput.jsonl").rounds
    known = account_for_time(Ledger([replace(only, end=None)]))  # only the ledger shows what came after the last line
    assert last == {f"goodput/{category}": part / known.total for category, part in known.micros.items()}
    assert "| productive |" in Path(tables.log_dir, "goodput.txt").read_text()


def test_a_line_is_written_no_more_often_than_asked(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, GoodputMonitor(1e6), ModelCheckpoint(tmp_path / "c"), max_epochs=2)
    trainer.fit(Scripted(), batches(), batches(4))
    steps = [(one.first, one.last) for one in read_ledger(tmp_path / "goodput.jsonl").rounds[0].periods]
    assert steps == [(0, 1), (1, 8), (8, 8)]


def test_rank_0_alone_writes(tmp_path: Path) -> None:
    fit(tmp_path, strategy="ddp", devices=2)
    (only,) = read_ledger(tmp_path / "goodput.jsonl").rounds
    assert only.start.world_size == 2
    assert account_of(tmp_path).kept_steps == 4


# --- what cannot be ---


def test_a_folder_that_cannot_be_written_is_an_error_before_training(tmp_path: Path) -> None:
    (tmp_path / "goodput.jsonl").mkdir()
    trainer = trainer_in(tmp_path, GoodputMonitor())
    with pytest.raises(ConfigError, match="GoodputMonitor cannot write .*goodput.jsonl.* .Is a directory.; give"):
        trainer.fit(Scripted(), batches())
    assert trainer.global_step == 0


def test_a_disk_that_is_full_ends_the_ledger_and_not_the_run(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(trainer: Any, module: Any) -> None:
        if trainer.global_step == 3:
            size = (tmp_path / "goodput.jsonl").stat().st_size + 10
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))

    def clear(trainer: Any, module: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    around = LambdaCallback(on_train_step_end=fill), GoodputMonitor(0.0), LambdaCallback(on_train_step_end=clear)
    trainer = trainer_in(tmp_path, *around, max_epochs=2)
    with pytest.warns(UserWarning, match="The goodput ledger ends here"):
        trainer.fit(Scripted(), batches())
    assert trainer.global_step == 8
    ledger = read_ledger(tmp_path / "goodput.jsonl")
    assert (ledger.rounds[0].periods[-1].last, ledger.num_skipped) == (2, 1)


def test_a_negative_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="every_seconds must be >= 0, got -1"):
        GoodputMonitor(-1)
