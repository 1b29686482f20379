"""Snapshots in memory are taken every few steps, or as often as costs little, at the same steps on all ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from scripted import Scripted, batches, trainer_in
from torch import nn

from echelon import Callback, Trainer
from echelon.callbacks.memory_snapshots import SnapshotInMemory
from echelon.common.errors import ConfigError
from echelon.strategies.snapshots.snapshots import SnapshotCost
from echelon.testing import run_ranks


class Costing:
    """Snapshots that all have the same cost."""

    def __init__(self, seconds: float | None) -> None:
        self.set(seconds)

    def set(self, seconds: float | None) -> None:
        self.cost = None if seconds is None else SnapshotCost(seconds / 4, seconds * 3 / 4)


class Counting(Trainer):
    """A trainer that notes when it was asked for a snapshot."""

    def take_snapshot(self) -> None:
        self.__dict__.setdefault("taken", []).append(self.global_step)
        super().take_snapshot()


class At(Callback):
    """Does something at a step, once."""

    def __init__(self, step: int, what: Any) -> None:
        self.step, self.what = step, what

    def on_train_step_end(self, trainer: Any, module: nn.Module) -> None:
        if trainer.global_step == self.step:
            self.step = -1
            self.what(trainer)


def counting(folder: Path, *callbacks: Any, **settings: Any) -> Any:
    """Return the trainer that most tests want, and which counts."""
    trainer: Any = trainer_in(folder, *callbacks, **{"max_epochs": 5, **settings})
    trainer.__class__ = Counting
    trainer.taken = []
    return trainer


@pytest.mark.parametrize(
    ("every", "cost", "taken"),
    [
        (6, 1.0, [6, 12, 18]),
        (1, None, list(range(1, 21))),
        (0, 0.1, []),
        (None, 1e9, [3]),  # too dear for another
        (None, 1e-12, list(range(3, 21))),  # for nothing, as often as can be
        (None, None, [3]),  # never seen to end
    ],
)
def test_the_interval_is_given_or_follows_the_cost(
    every: int | None, cost: float | None, taken: list[int], tmp_path: Path
) -> None:
    trainer = counting(tmp_path, SnapshotInMemory(Costing(cost), every))
    trainer.fit(Scripted(), batches())
    assert trainer.global_step == 20
    assert trainer.taken == taken


@pytest.mark.parametrize(
    ("seconds", "cost", "gap"),
    [(1.0, 0.7, 94), (2.0, 0.7, 47), (1.0, 1.4, 187), (0.05, 0.7, None)],  # 0.75% of the time of training
)
def test_the_interval_grows_with_the_cost_and_shrinks_with_the_time_of_a_step(
    seconds: float, cost: float, gap: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        """Every step takes this long, and nothing else takes any time."""

        trainer: Any

        def perf_counter(self) -> float:
            return float(seconds * self.trainer.global_step)

    clock = Clock()
    monkeypatch.setattr("echelon.callbacks.memory_snapshots.time", clock)
    trainer = clock.trainer = counting(tmp_path, SnapshotInMemory(Costing(cost)), max_steps=400, max_epochs=-1)
    trainer.fit(Scripted(), batches())
    assert trainer.taken == ([3] if gap is None else list(range(3, 401, gap)))


def test_a_run_that_is_interrupted_takes_one_at_its_last_step(tmp_path: Path) -> None:
    stop = At(7, lambda trainer: os.kill(os.getpid(), signal.SIGTERM))
    trainer = counting(tmp_path, SnapshotInMemory(Costing(1.0), 5), stop)
    with pytest.raises(SystemExit):
        trainer.fit(Scripted(), batches())
    assert trainer.taken == [5, trainer.global_step]
    never = counting(tmp_path, SnapshotInMemory(Costing(1.0), 0), At(7, stop.what))
    with pytest.raises(SystemExit):
        never.fit(Scripted(), batches())
    assert never.taken == []


def test_a_run_that_goes_back_takes_one_at_once(tmp_path: Path) -> None:
    save = At(2, lambda trainer: trainer.save_checkpoint(tmp_path / "a.ckpt"))
    back = At(7, lambda trainer: trainer.roll_back())
    trainer = counting(tmp_path, save, back, SnapshotInMemory(Costing(1.0), 5), max_epochs=4)
    trainer.fit(Scripted(), batches())
    assert trainer.taken == [5, 2, 7]


def test_a_negative_interval_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"snapshot_every must be >= 0 .* got -1"):
        SnapshotInMemory(Costing(0.0), -1)


def fit_on_rank(folder: str) -> list[list[int]]:
    """Train twice; each time a different rank finds that a snapshot is costly, or under way."""
    found: list[list[int]] = []
    for dear in (1e9, None):
        rank = int(os.environ["RANK"])
        snapshots = Costing(dear if rank == len(found) else 1e-12)
        trainer = counting(Path(folder), SnapshotInMemory(snapshots), strategy="ddp", devices=2)
        trainer.fit(Scripted(), batches(16))
        found.append(trainer.taken)
    return found


def test_all_ranks_take_the_same_snapshots(tmp_path: Path) -> None:
    assert run_ranks(fit_on_rank, 2, str(tmp_path)) == [[[3], [3]], [[3], [3]]]
