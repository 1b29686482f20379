"""Mistakes with schedules and manual optimization that are asked about in public threads, and right neighbours."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from small import Regression, loader, quiet
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, StepLR
from torch.utils.data import DataLoader, IterableDataset


def fit(module: Any, **settings: Any) -> None:
    quiet(**{"max_epochs": 3, **settings}).fit(module, loader())


def warns(text: str) -> Any:
    return pytest.warns(UserWarning, match=re.escape(text))


class Scheduled(Regression):
    """A regression with a schedule, stepped by epochs or by steps."""

    def __init__(self, make: Callable[[Any], Any], interval: str) -> None:
        super().__init__()
        self.make, self.interval = make, interval

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": self.make(optimizer), "interval": self.interval}]


# --- schedules; the fit has 3 epochs of 4 steps ---


@pytest.mark.parametrize(
    ("make", "interval", "settings", "text"),
    [
        (lambda o: CosineAnnealingLR(o, T_max=3), "step", {}, "T_max=3, the epochs of this fit"),
        (lambda o: CosineAnnealingLR(o, T_max=12), "epoch", {}, "T_max=12, the steps of this fit"),
        (
            lambda o: OneCycleLR(o, 0.1, total_steps=12),
            "step",
            {"accumulate_grad_batches": 2},
            "total_steps=12, the batches of this fit, but is stepped after each step, 6 times",
        ),
        (
            lambda o: LambdaLR(o, lambda n: max(0.0, 1 - n / 3)),
            "step",
            {},
            "brought the learning rate to 0",
        ),
        (lambda o: LambdaLR(o, lambda n: n / 100), "epoch", {}, "begins with a learning rate of 0"),
    ],
)
def test_a_schedule_of_another_length_is_pointed_out(make: Any, interval: str, settings: Any, text: str) -> None:
    with warns(text):
        fit(Scheduled(make, interval), **settings)


@pytest.mark.parametrize(
    ("make", "interval"),
    [
        (lambda o: CosineAnnealingLR(o, T_max=12), "step"),
        (lambda o: CosineAnnealingLR(o, T_max=3), "epoch"),
        (lambda o: CosineAnnealingLR(o, T_max=5), "step"),
        (lambda o: LambdaLR(o, lambda n: max(0.0, 1 - n / 12)), "step"),
        (lambda o: LambdaLR(o, lambda n: max(0.0, 1 - n / 11)), "step"),
        (lambda o: LambdaLR(o, lambda n: min(1.0, n / 4)), "step"),
    ],
)
def test_a_schedule_that_fits_is_left_alone(make: Any, interval: str) -> None:
    fit(Scheduled(make, interval))


class Endless(IterableDataset[Any]):
    """A stream without a length."""

    def __iter__(self) -> Iterator[Any]:
        return ((torch.ones(2), torch.ones(1)) for _ in range(8))


def test_a_stream_without_a_length_has_no_length_to_compare() -> None:
    module = Scheduled(lambda o: OneCycleLR(o, 0.1, total_steps=8), "step")
    quiet(max_epochs=2, max_steps=3).fit(module, DataLoader(Endless(), 2))
    assert module.trainer.global_step == 3


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_scheduler_that_the_module_steps_too_is_pointed_out() -> None:
    class Stepping(Scheduled):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.lr_schedulers().step()
            return super().training_step(batch, batch_idx)

    with warns("StepLR was stepped 1 times since the trainer stepped it last"):
        fit(Stepping(lambda o: StepLR(o, 1), "step"))


class Manual(Scheduled):
    """Optimizes itself, with and without a reset of its gradients and a step of its schedule."""

    def __init__(self, *, zeroes: bool = True, schedules: bool = True) -> None:
        super().__init__(lambda o: StepLR(o, 1), "epoch")
        self.automatic_optimization = False
        self.zeroes, self.schedules = zeroes, schedules

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        if self.zeroes:
            optimizer.zero_grad()
        self.manual_backward(nn.functional.mse_loss(self(batch[0]), batch[1]))
        optimizer.step()

    def on_train_epoch_end(self) -> None:
        if self.schedules:
            self.lr_schedulers().step()


def test_gradients_that_are_never_reset_by_hand_are_pointed_out(caplog: Any) -> None:
    with warns("SGD steps with the gradients of earlier steps added to its own"):
        fit(Manual(zeroes=False))
    assert "has not been stepped" not in caplog.text
    fit(Manual(schedules=False))
    assert "StepLR has not been stepped in 2 epochs: in manual optimization, call scheduler.step()" in caplog.text


@pytest.mark.parametrize("reset", [lambda m: m.zero_grad(), lambda m: m.zero_grad(set_to_none=False)])
def test_gradients_that_are_reset_in_another_way_are_left_alone(reset: Any) -> None:
    class Resets(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            reset(self)
            super().training_step(batch, batch_idx)

    fit(Resets(zeroes=False))
