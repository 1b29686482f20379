"""Modules with one fault each, which shows only on several ranks, with the name of the part it is in."""

from typing import ClassVar

import torch
from sweep import IS_SWEEP
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import ParallelStrategy, TrainModule
from echelon.trainer.verify import Layout


class Sound(TrainModule):
    """A small regression without a fault."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 8), nn.Identity(), nn.Linear(8, 1)

    def configure_pipeline(self, num_stages):
        return [["first"], ["last"]]

    @property
    def ranks(self):
        return self.trainer.strategy.world_size

    def forward(self, x):
        return self.last(self.middle(self.first(x).tanh()))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class DoublesAGradient(Sound):
    def on_after_backward(self):
        if self.trainer.strategy.rank == 1:
            self.last.weight.grad.mul_(2)


class CountsAMetricTwice(Sound):
    def training_step(self, batch, batch_idx):
        total = self.trainer.strategy.all_reduce(torch.tensor(float(len(batch[0]))), "sum")
        self.log("samples", total, reduce_fx="sum", on_step=True)
        return super().training_step(batch, batch_idx)


class Center(nn.Module):
    """Keeps a running mean that ranks do not share."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        out = x - self.mean
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.5)
        return out


class KeepsABuffer(Sound):
    def __init__(self):
        super().__init__()
        self.middle = Center()


class FixedHeads(nn.Module):
    """Attention that reshapes by the number of its heads, and so gets the width of a head wrong."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        heads = (part(x).unflatten(-1, (2, -1)).transpose(1, 2) for part in (self.query, self.key, self.value))
        return x + self.out(nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class CountsHeads(Sound):
    tp_plan: ClassVar = {
        **dict.fromkeys(("middle.query", "middle.key", "middle.value"), "colwise"),
        "middle.out": "rowwise",
    }

    def __init__(self):
        super().__init__()
        self.first, self.middle = nn.Linear(1, 8), FixedHeads()

    def forward(self, x):
        return self.last(self.middle(self.first(x.unsqueeze(-1)))).mean(1)


class LeavesAParameterOut(Sound):
    def configure_optimizers(self):
        left = [self.last, self.first] if self.ranks == 1 else [self.last]
        return torch.optim.SGD([p for part in left for p in part.parameters()], lr=0.1)


class StepsAScheduler(Sound):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.ranks > 1:
            self.trainer.lr_scheduler_configs[0].scheduler.step()


class Noise(nn.Module):
    """Dropout that cannot be switched off."""

    def forward(self, x):
        return x * torch.bernoulli(torch.full_like(x, 0.5))


class LeavesDropoutOn(Sound):
    def __init__(self):
        super().__init__()
        self.middle = Noise()


class MeansUnequalParts(Sound):
    def training_step(self, batch, batch_idx):
        x, y = batch
        counts = 1.0 + (x[:, 0] > 0)
        return ((self(x) - y).square()[:, 0] * counts).sum() / counts.sum()


class NormalisesItsPart(Sound):
    def __init__(self):
        super().__init__()
        self.middle = nn.BatchNorm1d(8)


class Positions(nn.Module):
    """Numbers the tokens of a rank from 0."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return x + self.table[: x.shape[1]]


class CountsPositions(Sound):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Embedding(12, 8), Positions(), nn.Linear(8, 12)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.last(self.middle(self.first(x))).flatten(0, 1), y.flatten())


class Scaled(nn.Linear):
    """A layer whose backward multiplies by the number of ranks."""

    def forward(self, x):
        out = super().forward(x)
        scale = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        return out.detach() * (1 - scale) + out * scale


class ScalesABackward(Sound):
    def __init__(self):
        super().__init__()
        self.middle = Scaled(8, 8)


class Pooled(nn.Module):
    """Subtracts the mean over the batch, though each rank has only a part of it."""

    def forward(self, x):
        return x - x.mean(0)


class PoolsItsPart(Sound):
    def __init__(self):
        super().__init__()
        self.middle = Pooled()


class ForgetsAStage(Sound):
    """Trains one of its stages only."""

    def configure_optimizers(self):
        left = self.parameters() if self.ranks == 1 else self.last.parameters()
        return torch.optim.SGD(left, lr=0.1)


FAULTS = [
    (DoublesAGradient, "ddp", "last", "disagree"),
    (CountsAMetricTwice, "ddp", None, "counted twice"),
    (KeepsABuffer, "fsdp", "middle", "buffer"),
    (CountsHeads, "tp", "middle", "heads"),
    (LeavesAParameterOut, "ddp", "first", "left out"),
    (LeavesDropoutOn, "ddp", "middle", "random numbers"),
    (MeansUnequalParts, "zero", "", "unequal parts"),
    (NormalisesItsPart, "ddp", "middle", "batch statistics"),
    (CountsPositions, Layout(ParallelStrategy(cp=2), 2), "middle", "positions"),
    (PoolsItsPart, "fsdp", "middle", "whole batch"),
    (StepsAScheduler, "ps", None, "scheduler"),
    (DoublesAGradient, "ps", "last", "differ"),
]
if IS_SWEEP:
    FAULTS += [
        (ScalesABackward, "ddp", "middle", "counted twice"),
        (ForgetsAStage, "pp", "first", "left out"),
        (StepsAScheduler, "ddp", None, "scheduler"),
        (KeepsABuffer, "ps", "middle", "buffer"),
        (MeansUnequalParts, "ps", "", "unequal parts"),
        (MeansUnequalParts, "pp", "", "unequal parts"),
    ]
"""A module, the layout on which it shows, the part that is to be named, and a word of the cause."""


def data(module):
    """Loaders for a module: of 17 samples to train and 5 to validate."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 4, generator=generator)
    samples = TensorDataset(x, x.sum(1, keepdim=True).sin())
    if module is CountsPositions:
        tokens = torch.randint(12, (40, 9), generator=generator)
        samples = TensorDataset(tokens[:, :-1], tokens[:, 1:])
        return DataLoader(samples, 8, shuffle=True)
    return DataLoader(samples, 8, shuffle=True), DataLoader(TensorDataset(*samples[:5]), 2)
