"""GradientAccumulationScheduler sets the number of micro-batches of a step, by epoch."""

from pathlib import Path
from typing import Any

import pytest
from scripted import Scripted, batches, trainer_in

from echelon import Callback, GradientAccumulationScheduler
from echelon.common.errors import ConfigError


class Steps(Callback):
    def __init__(self) -> None:
        self.at_epoch_end: list[int] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.at_epoch_end.append(trainer.global_step)


def test_epochs_take_as_many_steps_as_scheduled(tmp_path: Path) -> None:
    steps = Steps()
    trainer = trainer_in(tmp_path, GradientAccumulationScheduler({1: 2, 3: 4}), steps, max_epochs=5)
    trainer.fit(Scripted(), batches())
    assert steps.at_epoch_end == [4, 6, 8, 9, 10]


def test_the_factor_of_an_epoch_is_that_of_the_last_start_before_it() -> None:
    scheduler = GradientAccumulationScheduler({2: 4, 5: 1})
    assert [scheduler.get_accumulate_grad_batches(epoch) for epoch in range(7)] == [1, 1, 4, 4, 4, 1, 1]
    assert scheduler.going_to_accumulate_grad_batches()
    assert not GradientAccumulationScheduler({0: 1}).going_to_accumulate_grad_batches()


@pytest.mark.parametrize(
    ("scheduling", "message"),
    [
        ({}, "scheduling must name an epoch, got scheduling={}"),
        ({-1: 2}, "Epoch should be an int from 0 on, got -1"),
        ({"0": 2}, "Epoch should be an int from 0 on, got '0'"),
        ({1: 0}, r"scheduling\[1\]: Accumulation factor should be an int, got 0; give 1 or more"),
        ({1: 2.0}, r"scheduling\[1\]: Accumulation factor should be an int, got 2.0; give 1 or more"),
    ],
)
def test_what_is_no_schedule_is_refused_at_once(scheduling: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GradientAccumulationScheduler(scheduling)


def test_a_second_source_of_the_same_number_is_refused(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, GradientAccumulationScheduler({0: 2}), accumulate_grad_batches=2)
    with pytest.raises(ConfigError, match="which sets it too, got accumulate_grad_batches=2; remove"):
        trainer.fit(Scripted(), batches())


def test_a_second_fit_starts_the_schedule_again(tmp_path: Path) -> None:
    steps = Steps()
    trainer = trainer_in(tmp_path, GradientAccumulationScheduler({1: 2}), steps, max_epochs=2)
    module = Scripted()
    trainer.fit(module, batches())
    trainer.fit(module, batches())
    assert steps.at_epoch_end == [4, 6, 4, 6]
