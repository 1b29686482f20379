"""One node whose workers die, hang and fail: how each run ends, and that nothing is left of it."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from elastic_nodes import EXACT, MEMORY, Undisturbed, curve, difference
from elastic_program import BATCH, STEPS_OF_EPOCH, Regression

from echelon import Callback, CSVLogger, ElasticStrategy, ModelCheckpoint, Trainer, seed_everything
from echelon.callbacks.goodput.ledger import read_ledger
from echelon.callbacks.goodput.spans import account_for_time
from echelon.common.errors import ProcessError

EPOCHS = 2
STEPS = EPOCHS * STEPS_OF_EPOCH


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return Undisturbed.run(tmp_path_factory.mktemp("undisturbed"), EPOCHS)


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert not list(MEMORY.glob(f"echelon-node-{os.getpid()}-*"))


@pytest.fixture
def rounds(caplog):
    """Return how the rounds ended, as the agent reported."""
    caplog.set_level(logging.WARNING, logger="echelon")
    return lambda: [
        found[1]
        for record in caplog.records
        if (found := re.match(r"Round \d+ ended: (.*)\. The workers start again\.", record.getMessage(), re.DOTALL))
    ]


def fit(folder: Path, *callbacks: Callback, checkpoints: bool = False, **options: Any) -> dict[str, Any]:
    """Train on two workers and return the weights."""
    seed_everything(1)
    trainer = Trainer(
        strategy=ElasticStrategy("ddp", **{"snapshot_every": 3, **options}),
        accelerator="cpu",
        devices=2,
        global_batch_size=BATCH,
        max_epochs=EPOCHS,
        check_val_every_n_epoch=2,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        callbacks=list(callbacks),
        logger=CSVLogger(folder, "csv"),
        default_root_dir=folder,
        enable_checkpointing=checkpoints,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Regression()
    trainer.fit(module)
    return module.state_dict()


class Meanwhile(Callback):
    """Acts on one rank after a step, in some rounds; notes where each round began."""

    def __init__(self, folder: Path, rank: int = 0, step: int = 0, rounds: int = 1) -> None:
        self.folder, self.rank, self.step, self.rounds = folder, rank, step, rounds

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if trainer.is_global_zero:
            with (self.folder / "began").open("a") as file:
                file.write(f"{trainer.global_step}\n")

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        number = trainer.strategy.launcher.supervisor.round.number
        if trainer.global_step == self.step and trainer.strategy.rank == self.rank and number < self.rounds:
            self.act(trainer)

    def act(self, trainer: Any) -> None:
        """Do nothing."""

    def began(self) -> list[int]:
        """Return after which step each round began."""
        return [int(line) for line in (self.folder / "began").read_text().split()]


class Fails(Meanwhile):
    def act(self, trainer: Any) -> None:
        raise ZeroDivisionError(f"what step {trainer.global_step} always does")


class KillsTheForkServer(Meanwhile):
    def act(self, trainer: Any) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)  # until the kernel has heard of it


class Dies(Meanwhile):
    """With snapshots complete that were taken before."""

    def act(self, trainer: Any) -> None:
        trainer.session.recovery.snapshots.close()
        self.damage(trainer.strategy.launcher.supervisor.folder)
        os.kill(os.getpid(), signal.SIGKILL)

    def damage(self, folder: Path) -> None:
        """Leave the snapshots as they are."""


class DiesWithItsSnapshots(Dies):
    def damage(self, folder: Path) -> None:
        files = [file for file in (folder / "snapshots").rglob("*") if file.is_file() and file.stat().st_size > 1000]
        assert files
        for file in files:
            with file.open("r+b") as content:
                content.seek(file.stat().st_size // 2)
                content.write(b"damaged")


def test_whatever_befalls_the_workers_the_run_takes_the_same_steps(memory_path, undisturbed, rounds):
    chaos = (
        "kill:rank=1@step=5, raise:rank=0@step=9, kill:node=0@step=14, exit:rank=1+code=3@snapshot=2, "
        "kill:rank=1@validation=1, stop:rank=1@step=22, hang:rank=0@step=24"
    )
    weights = fit(memory_path, chaos=chaos, hang_timeout=timedelta(seconds=2))
    told = rounds()
    patterns = {
        r"Rank [01] of 2 \(process \d+\) was killed by SIGKILL": 3,
        r"Rank 0 of 2 \(process \d+\) failed with RuntimeError: This error was injected": 1,
        r"Rank 1 of 2 \(process \d+\) ended with exit code 3": 1,
        r"Rank 1 \(process \d+\) has been stopped by a signal": 1,
        r"Rank .* made no progress for": 1,
    }
    assert {pattern: sum(bool(re.match(pattern, text)) for text in told) for pattern in patterns} == patterns, told
    folder = memory_path / "csv" / "version_0"
    assert difference(weights, undisturbed.weights) <= EXACT
    assert [step for step, _ in curve(folder)] == list(range(1, STEPS + 1))
    goodput = account_for_time(read_ledger(folder / "goodput.jsonl"))
    assert (goodput.kept_steps, len(goodput.rounds)) == (STEPS, 8)
    stacks = {file.name: file.read_text() for file in (folder / "stacks").iterdir()}
    assert len(stacks) == 4
    assert sum("chaos_monkey.py" in text and "_act" in text for text in stacks.values()) == 1


@pytest.mark.only_in_sweep
def test_the_fork_server_is_killed(memory_path, undisturbed, rounds):
    weights = fit(memory_path, killing := KillsTheForkServer(memory_path, step=8))
    assert difference(weights, undisturbed.weights) <= EXACT
    assert killing.began() == [0, 6]
    assert len(rounds()) == 1


@pytest.mark.parametrize(("kind", "expected"), [(Dies, 12), (DiesWithItsSnapshots, 10)])
def test_a_run_goes_on_from_memory_and_else_from_the_disk(memory_path, undisturbed, kind, expected):
    saving = ModelCheckpoint(every_n_train_steps=5, save_top_k=-1)
    weights = fit(memory_path, dying := kind(memory_path, step=13), saving, checkpoints=True)
    assert dying.began() == [0, expected]
    assert difference(weights, undisturbed.weights) <= EXACT


def test_a_failure_that_repeats_is_the_users_own_exception_with_a_report(memory_path):
    with pytest.raises(ZeroDivisionError, match="what step 7 always does") as raised:
        fit(memory_path, failing := Fails(memory_path, rank=1, step=7, rounds=100))
    notes = "\n".join(raised.value.__notes__)
    assert re.search("The run failed 3 times in a row after step [67] with the same cause", notes), notes
    assert failing.began() == [0, 6, 6]


def test_the_restarts_are_used_up(memory_path):
    with pytest.raises(ProcessError, match="was killed by SIGKILL") as raised:
        fit(memory_path, chaos="kill:rank=0@step=3, kill:rank=1@step=6", max_restarts=1)
    assert "The run failed 2 times, and max_restarts=1" in "\n".join(raised.value.__notes__)
