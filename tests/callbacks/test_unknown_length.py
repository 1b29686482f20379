"""Callbacks count each step once, also where only reading tells that an epoch has ended, and the hook comes again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from recording_logger import RecordingLogger
from small import quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from echelon import Callback, ExpertBalance, Experts, LearningRateFinder, ParallelStrategy, Timeline, TrainModule


class Unknown(IterableDataset[Tensor]):
    """Samples whose number nobody knows."""

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((4,), 0.1 * (1 + number)) for number in range(6))


class Blocks(TrainModule):
    """Two blocks for two stages of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.lr = 0.01

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.blocks(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Routed(Blocks):
    """Has experts that a router chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 4), Experts(4, 8, 2, top_k=1))


def fit(folder: Path, module: Any, *callbacks: Callback, **settings: Any) -> None:
    trainer = quiet(folder, callbacks=list(callbacks), max_epochs=3, **settings)
    trainer.fit(module, DataLoader(Unknown(), 2 // trainer.accumulate_grad_batches))
    assert trainer.global_step == 9


def test_a_search_of_rates_has_a_loss_for_each(tmp_path: Path) -> None:
    finder = LearningRateFinder(min_lr=1e-4, max_lr=1e-2, num_training_steps=8, early_stop_threshold=None)
    fit(tmp_path, Blocks(), finder)
    assert finder.optimal_lr is not None
    losses = finder.optimal_lr.results["loss"]
    assert len(losses) == 8
    assert all(map(math.isfinite, losses))


def test_the_tokens_of_experts_are_those_of_the_last_step(tmp_path: Path) -> None:
    balance, logger = ExpertBalance(rate=0.01), RecordingLogger(str(tmp_path))
    fit(tmp_path, Routed(), balance, logger=logger, log_every_n_steps=1)
    [counts] = balance.tokens.values()
    assert sum(counts) == 2
    assert [step for step, row in logger.records if any("expert" in name for name in row)] == list(range(1, 10))


def test_each_of_two_fits_of_one_step_counts(tmp_path: Path) -> None:
    balance, logger = ExpertBalance(), RecordingLogger(str(tmp_path))
    for _ in range(2):
        trainer = quiet(tmp_path, callbacks=[balance], max_steps=1, logger=logger, log_every_n_steps=1)
        trainer.fit(Routed(), DataLoader(Unknown(), 2))
    assert sum(any("expert" in name for name in row) for _, row in logger.records) == 2


@pytest.mark.parametrize("step", [2, 4])
def test_a_timeline_is_of_the_step_that_was_asked_for(tmp_path: Path, step: int) -> None:
    asked = []

    class Noting(Timeline):
        def on_train_step_end(self, trainer: Any, module: Any) -> None:
            super().on_train_step_end(trainer, module)
            if self.idle_share is not None and not asked:
                asked.append(trainer.global_step)
                assert trainer.global_step == step

    timeline = Noting(tmp_path / "timeline.png", step=step)
    fit(tmp_path, Blocks(), timeline, strategy=ParallelStrategy(pp=2), devices=2, accumulate_grad_batches=2)
    assert timeline.idle_share is not None
