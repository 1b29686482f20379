"""Lengths that public threads get wrong: of schedules, of accumulation, of the values of a plateau."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
from small import Regression, loader, quiet
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, ReduceLROnPlateau


def warns(text: str) -> Any:
    return pytest.warns(UserWarning, match=re.escape(text))


class Scheduled(Regression):
    """A regression with a schedule, and a loss of validation."""

    def __init__(self, make: Callable[[Any], Any], **config: Any) -> None:
        super().__init__()
        self.make, self.config = make, {"interval": "step", **config}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", float(self.global_step))

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": self.make(optimizer), **self.config}]


def fit(module: Any, **settings: Any) -> None:
    quiet(**{"max_epochs": 2, "num_sanity_val_steps": 0, **settings}).fit(module, loader(), loader())


def shrinking(step: int, *, num_training_steps: int) -> float:
    return max(0.0, 1 - step / num_training_steps)


def as_transformers(length: int) -> Callable[[Any], Any]:
    return lambda o: LambdaLR(o, functools.partial(shrinking, num_training_steps=length))


# the fit has 2 epochs of 8 samples, in 4 batches


@pytest.mark.parametrize(
    ("make", "settings", "text"),
    [
        (as_transformers(8), {"accumulate_grad_batches": 2}, "num_training_steps=8, the batches of this fit"),
        (lambda o: LinearLR(o, 1.0, 0.1, 8), {"accumulate_grad_batches": 2}, "total_iters=8, the batches of this fit"),
        (lambda o: OneCycleLR(o, 0.1, steps_per_epoch=8, epochs=2), {}, "total_steps=16, the samples of this fit"),
        (lambda o: CosineAnnealingLR(o, 16), {}, "T_max=16, the samples of this fit"),
    ],
)
def test_a_schedule_as_long_as_the_batches_or_samples_is_pointed_out(make: Any, settings: Any, text: str) -> None:
    with warns(text):
        fit(Scheduled(make), **settings)


@pytest.mark.parametrize(
    "make",
    [as_transformers(8), lambda o: LinearLR(o, 1.0, 0.1, 8), lambda o: LinearLR(o, 0.1, 1.0, 2)],
)
def test_a_schedule_as_long_as_the_steps_and_a_warmup_are_left_alone(make: Any) -> None:
    fit(Scheduled(make))


@pytest.mark.parametrize(("interval", "length"), [("step", 9), ("epoch", 3)])
def test_a_warmup_that_is_longer_than_the_fit_is_pointed_out(interval: str, length: int) -> None:
    with warns(f"LinearLR has total_iters={length}, a warmup that is longer than this fit, which has {length - 1}"):
        fit(Scheduled(lambda o: LinearLR(o, 0.1, 1.0, length), interval=interval))
    fit(Scheduled(lambda o: LinearLR(o, 0.1, 1.0, length - 1), interval=interval))


def test_a_plateau_that_reads_one_value_many_times_is_pointed_out() -> None:
    with warns("ReduceLROnPlateau got val_loss=4 three times in a row, as it is stepped after every 1 steps"):
        fit(Scheduled(ReduceLROnPlateau, monitor="val_loss"))
    fit(Scheduled(ReduceLROnPlateau, monitor="val_loss", frequency=4))
    fit(Scheduled(ReduceLROnPlateau, monitor="loss"))
    fit(Scheduled(ReduceLROnPlateau, monitor="val_loss", interval="epoch"))


def test_an_accumulation_that_no_epoch_reaches_is_told(caplog: Any) -> None:
    with caplog.at_level("INFO"):
        fit(Regression(), accumulate_grad_batches=4)
        assert "accumulate_grad_batches" not in caplog.text
        fit(Regression(), accumulate_grad_batches=16)
    assert "accumulate_grad_batches=16 is above the 4 batches of an epoch: each epoch is one step" in caplog.text


def test_a_validation_on_other_samples_each_time_is_told(caplog: Any) -> None:
    def validate(limit: int, **options: Any) -> bool:
        caplog.clear()
        with caplog.at_level("INFO"):
            quiet(max_epochs=1, limit_val_batches=limit).fit(Regression(), loader(), loader(**options))
        return "limit_val_batches=2 of a validation loader that shuffles" in caplog.text

    assert validate(2, shuffle=True)
    assert not validate(2)
    assert not validate(4, shuffle=True)
