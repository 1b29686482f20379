"""Learning rates in the loggers: under Lightning's names, at the right steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recording_logger import RecordingLogger
from scripted import Scripted, batches, trainer_in
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from echelon.callbacks import Callback, LearningRateMonitor
from echelon.common.errors import ConfigError


class Configured(Scripted):
    """Trains with what `configure` returns for its parameters."""

    def __init__(self, configure: Callable[[Any], Any]) -> None:
        super().__init__()
        self.configure = configure

    def configure_optimizers(self) -> Any:
        return self.configure(list(self.parameters()))


class Manual(Configured):
    """Steps all of its optimizers itself."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.net(batch[0]).square().mean())
            optimizer.step()


def falling(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


def fit(folder: Path, module: Scripted, monitor: LearningRateMonitor, **settings: Any) -> RecordingLogger:
    logger = RecordingLogger(str(folder))
    trainer = trainer_in(folder, monitor, **{"logger": logger, "log_every_n_steps": 1, "max_epochs": 2, **settings})
    trainer.fit(module, batches())
    return logger


def by_step(parameters: Any) -> Any:
    optimizer = SGD(parameters, lr=1e-2)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": falling(optimizer), "interval": "step"}}


def test_a_step_is_logged_with_the_rate_that_it_trained_with(tmp_path: Path) -> None:
    logger = fit(tmp_path, Configured(by_step), LearningRateMonitor(), max_epochs=1)
    expected = [(step, pytest.approx(1e-2 / step)) for step in (1, 2, 3, 4)]
    assert logger.series("lr-SGD") == expected


def test_only_logged_steps_are_logged(tmp_path: Path) -> None:
    monitor = LearningRateMonitor("step")
    logger = fit(tmp_path, Configured(by_step), monitor, log_every_n_steps=3)
    assert [step for step, _ in logger.series("lr-SGD")] == [3, 6]
    assert monitor.lrs == {"lr-SGD": [pytest.approx(1e-2 / 3), pytest.approx(1e-2 / 6)]}


def test_accumulated_micro_batches_are_one_step(tmp_path: Path) -> None:
    logger = fit(tmp_path, Configured(by_step), LearningRateMonitor(), accumulate_grad_batches=2)
    assert [step for step, _ in logger.series("lr-SGD")] == [1, 2, 3, 4]


def test_an_epoch_scheduler_is_logged_once_an_epoch(tmp_path: Path) -> None:
    def configure(parameters: Any) -> Any:
        optimizer = SGD(parameters, lr=1e-2)
        return [optimizer], [falling(optimizer)]

    logger = fit(tmp_path, Configured(configure), LearningRateMonitor())
    assert logger.series("lr-SGD") == [(0, pytest.approx(1e-2)), (4, pytest.approx(5e-3))]


def test_an_interval_that_is_given_holds_for_all(tmp_path: Path) -> None:
    logger = fit(tmp_path, Configured(by_step), LearningRateMonitor("epoch"))
    assert [step for step, _ in logger.series("lr-SGD")] == [0, 4]


def test_an_optimizer_without_scheduler_is_logged(tmp_path: Path) -> None:
    logger = fit(tmp_path, Configured(lambda parameters: SGD(parameters, lr=0.5)), LearningRateMonitor())
    assert logger.series("lr-SGD") == [(0, 0.5), (4, 0.5)]


def test_a_resumed_epoch_is_not_logged_again(tmp_path: Path) -> None:
    module = Configured(lambda parameters: SGD(parameters, lr=0.5))
    first = trainer_in(tmp_path, max_epochs=1, max_steps=2)
    first.fit(module, batches())
    first.save_checkpoint(tmp_path / "middle.ckpt")
    logger = RecordingLogger(str(tmp_path))
    second = trainer_in(tmp_path, LearningRateMonitor(), max_epochs=2, logger=logger)
    second.fit(module, batches(), ckpt_path=tmp_path / "middle.ckpt")
    assert logger.series("lr-SGD") == [(4, 0.5)]


def test_groups_and_optimizers_have_lightnings_names(tmp_path: Path) -> None:
    def configure(parameters: Any) -> Any:
        weight, bias = parameters
        first = AdamW([{"params": [weight]}, {"params": [bias], "lr": 1e-2}], lr=1e-3)
        second = AdamW([{"params": [weight], "name": "head"}], lr=1e-4)
        third = SGD([bias], lr=1e-5)
        config = {"scheduler": falling(third), "name": "mine", "interval": "epoch"}
        return [{"optimizer": first}, {"optimizer": second}, {"optimizer": third, "lr_scheduler": config}]

    logger = fit(tmp_path, Manual(configure), LearningRateMonitor(), max_epochs=1)
    rates = {name: logger.series(name)[0][1] for name in logger.names("lr-") | logger.names("mine")}
    assert rates == {"lr-AdamW/pg1": 1e-3, "lr-AdamW/pg2": 1e-2, "lr-AdamW-1/head": 1e-4, "mine": 1e-5}


def test_momentum_and_weight_decay_are_logged_on_request(tmp_path: Path) -> None:
    def configure(parameters: Any) -> Any:
        return AdamW(parameters, lr=1e-3, betas=(0.8, 0.99), weight_decay=0.25)

    monitor = LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    logger = fit(tmp_path, Configured(configure), monitor, max_epochs=1)
    assert logger.series("lr-AdamW-momentum") == [(0, 0.8)]
    assert logger.series("lr-AdamW-weight_decay") == [(0, 0.25)]


def test_two_groups_with_one_name_are_refused(tmp_path: Path) -> None:
    def configure(parameters: Any) -> Any:
        return SGD([{"params": [p], "name": "same"} for p in parameters], lr=0.1)

    with pytest.raises(ConfigError, match="2 parameter groups would be logged as 'lr-SGD/same'"):
        fit(tmp_path, Configured(configure), LearningRateMonitor())


def test_an_unknown_interval_is_pointed_out() -> None:
    with pytest.raises(ConfigError, match="logging_interval must be .*, got 'steps'. Did you mean 'step'?"):
        LearningRateMonitor("steps")  # type: ignore[arg-type]


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_the_rates_are_callback_metrics_as_in_lightning(tmp_path: Path, interval: Any) -> None:
    read: list[float] = []

    class Reading(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            read.append(float(trainer.callback_metrics["lr-SGD"]))

    logger = RecordingLogger(str(tmp_path))
    callbacks = [LearningRateMonitor(interval, log_momentum=True), Reading()]
    trainer = trainer_in(tmp_path, *callbacks, logger=logger, log_every_n_steps=1, max_epochs=1)
    trainer.fit(Configured(by_step), batches())
    assert read == pytest.approx([1e-2, 1e-2 / 2, 1e-2 / 3, 1e-2 / 4] if interval == "step" else [1e-2] * 4)
    assert "lr-SGD-momentum" in trainer.callback_metrics


def test_the_newest_momentum_and_weight_decay_can_be_read(tmp_path: Path) -> None:
    monitor = LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    assert (monitor.log_momentum, monitor.last_momentum_values, monitor.last_weight_decay_values) == (True, {}, {})
    fit(tmp_path, Configured(lambda parameters: SGD(parameters, lr=0.5, momentum=0.75, weight_decay=0.25)), monitor)
    assert monitor.last_momentum_values == {"lr-SGD-momentum": 0.75}
    assert monitor.last_weight_decay_values == {"lr-SGD-weight_decay": 0.25}
