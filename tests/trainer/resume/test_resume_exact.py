"""A run interrupted after any step and resumed does bitwise what it would have done."""

import random

import numpy as np
import pytest
import torch
from resuming import Run, Small, assert_exact, numbered
from torch import nn

from echelon import EMAWeightAveraging

pytestmark = pytest.mark.sweep


def augment(x):
    """Draw from each generator that augmentations use."""
    return x + torch.randn(2) + random.gauss(0.0, 1.0) + torch.from_numpy(np.random.randn(2).astype("float32"))


class Several(Small):
    """Two optimizers and a schedule sized by the trainer."""

    def configure_optimizers(self):
        first = torch.optim.AdamW(self.net[:2].parameters(), lr=0.05)
        second = torch.optim.SGD(self.net[2:].parameters(), lr=0.05, momentum=0.9)
        total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(first, max_lr=0.1, total_steps=total)
        decay = torch.optim.lr_scheduler.ExponentialLR(second, 0.9)
        return [first, second], [{"scheduler": schedule, "interval": "step"}, decay]


def everything():
    return Run(
        Several(),
        numbered(8, augment=augment),
        numbered(4, shuffle=False),
        {"max_epochs": 3, "accumulate_grad_batches": 2, "val_check_interval": 2, "gradient_clip_val": 1.0},
    )


def test_with_validation_inside_the_epoch_two_optimizers_one_cycle_and_accumulation(memory_path):
    whole = assert_exact(everything, memory_path)
    assert whole.num_steps == 6  # 3 batches an epoch: windows of 2 and 1


class Plateau(Small):
    """A schedule by a metric of validation, one by the loss of steps."""

    def configure_optimizers(self):
        first = torch.optim.Adam(self.net[:2].parameters(), lr=0.1)
        second = torch.optim.SGD(self.net[2:].parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
        return [
            {"optimizer": first, "lr_scheduler": {"scheduler": plateau(first, patience=0), "monitor": "val_loss"}},
            {
                "optimizer": second,
                "lr_scheduler": {"scheduler": plateau(second, patience=0), "monitor": "loss_step", "interval": "step"},
            },
        ]


class Manual(Small):
    """Two optimizers that the module steps itself, the second one every other time."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        if batch_idx % 2 == 1:
            second.step()
            self.lr_schedulers().step()
        second.zero_grad()  # what a module accumulates over several of its steps is its own to save
        return loss

    def configure_optimizers(self):
        first = torch.optim.AdamW(self.net[:2].parameters(), lr=0.05)
        second = torch.optim.SGD(self.net[2:].parameters(), lr=0.05, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.ExponentialLR(second, 0.9)]


class Overflowing(Small):
    """Loss that overflows half precision in one step: the scaler leaves it out and halves its scale."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * (float("inf") if self.global_step == 3 else 1.0)


class SeveralSchedules(Small):
    """Schedules that are made of others."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        lrs = torch.optim.lr_scheduler
        warmup = lrs.LinearLR(optimizer, 0.1, total_iters=2)
        schedule = lrs.SequentialLR(optimizer, [warmup, lrs.CosineAnnealingLR(optimizer, 10)], milestones=[2])
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 2}]


class Closure(Small):
    """An optimizer that computes the loss itself, several times a step."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 1)

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


CASES = {
    "a metric decides the learning rate": lambda: Run(Plateau(), numbered(8), numbered(4), {"val_check_interval": 3}),
    "manual optimization": lambda: Run(Manual(), numbered(8), numbered(4)),
    "scaled gradients that overflow": lambda: Run(Overflowing(), numbered(8), None, {"precision": "16-mixed"}),
    "averaged weights": lambda: Run(
        Several(), numbered(8), numbered(4), {"val_check_interval": 2}, [EMAWeightAveraging(decay=0.7)]
    ),
    "schedules made of others": lambda: Run(SeveralSchedules(), numbered(), None, {"accumulate_grad_batches": 2}),
    "LBFGS": lambda: Run(Closure(), numbered(8), None),
    "validation across epochs": lambda: Run(
        Small(), numbered(8), numbered(4), {"val_check_interval": 2, "check_val_every_n_epoch": None}
    ),
    "the last batch dropped": lambda: Run(Small(), numbered(8, drop_last=True), None),
    "a fraction of the batches": lambda: Run(Small(), numbered(8), numbered(4), {"limit_train_batches": 2}),
    "the global batch given": lambda: Run(Small(), numbered(10, batch_size=2), None, {"global_batch_size": 4}),
    "until a number of steps": lambda: Run(Several(), numbered(8), None, {"max_epochs": -1, "max_steps": 5}),
    "in half precision": lambda: Run(Small(), numbered(8), None, {"precision": "bf16-mixed"}),
}


@pytest.mark.parametrize("case", CASES)
def test_interrupted_after_any_step(memory_path, case):
    assert_exact(CASES[case], memory_path)
