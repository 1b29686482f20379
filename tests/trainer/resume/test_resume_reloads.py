"""Loaders that are asked for again every few epochs are asked for in the same epochs by a resumed run."""

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from resuming import Run, Small, assert_exact, fit, numbered
from torch.utils.data import Sampler

from echelon import seed_everything


class Drawing(Sampler):
    """A permutation with a generator that goes on from epoch to epoch."""

    def __init__(self, size: int) -> None:
        self.size, self.rng = size, np.random.default_rng(size)

    def __iter__(self):
        return iter(self.rng.permutation(self.size).tolist())

    def __len__(self):
        return self.size


class Growing(Small):
    """Its loaders depend on the epoch in which they are asked for, its schedule on the number of steps."""

    def __init__(self, *, validates: bool = True) -> None:
        super().__init__()
        self.asked: list[tuple[str, int]] = []
        self.totals: list[Any] = []
        self.validates = validates

    def train_dataloader(self):
        self.asked.append(("train", self.trainer.current_epoch))
        size = 6 + 3 * self.trainer.current_epoch
        return numbered(size, shuffle=False, sampler=Drawing(size))

    def val_dataloader(self):
        self.asked.append(("val", self.trainer.current_epoch))
        return numbered(2 + self.trainer.current_epoch, shuffle=False) if self.validates else None

    def configure_optimizers(self):
        self.totals.append(self.trainer.estimated_stepping_batches)
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        total = self.totals[0]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (4 * total))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.sweep
@pytest.mark.parametrize(
    "settings",
    [
        {"reload_dataloaders_every_n_epochs": 1},
        {"reload_dataloaders_every_n_epochs": 2},
        {"reload_dataloaders_every_n_epochs": 3, "check_val_every_n_epoch": 2},
        {"reload_dataloaders_every_n_epochs": 2, "check_val_every_n_epoch": None, "val_check_interval": 3},
    ],
    ids=str,
)
def test_a_resumed_run_reads_the_loaders_of_the_epochs_in_which_the_whole_run_asked(memory_path, settings):
    def build():
        built.append(Growing())
        return Run(built[-1], None, None, {"max_epochs": 5, **settings})

    built: list[Growing] = []
    # epochs of 2, 3, 4 ... steps if each is asked for; the ends of epochs are among these steps
    assert_exact(build, memory_path, [1, 3, 5, 7, 9])
    assert set(chain.from_iterable(module.totals for module in built)) == {10}
    asked = [number for kind, number in built[0].asked if kind == "train"]
    assert asked == list(range(0, 5, settings["reload_dataloaders_every_n_epochs"]))


def test_a_checkpoint_that_does_not_say_when_loaders_were_asked_for_keeps_their_schedule(memory_path, monkeypatch):
    from echelon.trainer.session import train_state

    def build():
        return Run(Growing(), None, None, {"max_epochs": 5, "reload_dataloaders_every_n_epochs": 2})

    seed_everything(1)
    whole = fit(build(), memory_path / "whole")
    with monkeypatch.context() as older:
        state_dict = train_state.TrainState.state_dict
        older.setattr(
            train_state.TrainState,
            "state_dict",
            lambda self: {k: v for k, v in state_dict(self).items() if k not in ("loaded_in", "steps_per_epoch")},
        )
        seed_everything(1)
        begun = fit(build(), memory_path / "parts", stop_after=10)
    resumed = fit(build(), memory_path / "parts", ckpt_path="last")
    assert begun.samples + resumed.samples == whole.samples
