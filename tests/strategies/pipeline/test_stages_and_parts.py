"""Steps in stages and on parts of sequences at once: either comparison refuses on all ranks what it finds."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from as_rank import calm_down, double_trainer
from sweep import IS_SWEEP
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from echelon import DataError, ModuleError, ParallelStrategy, TrainModule, seed_everything
from echelon.testing import run_ranks


class Block(nn.Module):
    """Causal attention and two layers; a window hides only what is farther away than it is long."""

    def __init__(self, places: Any) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.places, self.window, self.calls = places, 12, 0

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        turned = 1 + 0.3 * self.places(length).to(x)[:, None].cos()
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q * turned, k * turned, v, is_causal=True)
        if length > self.window:
            y = y * 0.5
        x = x + self.out(y.transpose(1, 2).flatten(2))
        x = x + self.down(self.up(x).tanh())
        self.calls += 1
        return x


class Model(TrainModule):
    """What all strategies compute alike; subclasses depart from it."""

    tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block(self.places) for _ in range(4))
        self.head = nn.Linear(8, 16)

    def places(self, length: int) -> Tensor:
        positions: Tensor = self.trainer.strategy.positions(length)
        return positions

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())

    def training_step(self, batch: Any) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any) -> Any:
        self.log("loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OwnPlaces(Model):
    """Wrong in parts of sequences."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.places = torch.arange


class Calls(Model):
    """Wrong in stages, where the last one has not called the first block."""

    def loss(self, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            block.calls = 0
        return super().loss(tokens) * (1 + self.blocks[0].calls)


class Both(OwnPlaces, Calls):
    """Wrong in both."""


class RefusingPart(Model):
    """Raises on one of the ranks that share a sequence, if the loss and the first block are there: in whole runs."""

    def loss(self, tokens: Tensor) -> Tensor:
        self.blocks[0].calls = 0
        loss = super().loss(tokens)
        if self.blocks[0].calls and self.trainer.strategy.has_loss and not self.places(tokens.shape[1])[0]:
            raise DataError("This part of a sequence is refused.")
        return loss


IN_PARTS, IN_STAGES = "different results from parts of a sequence", "computes something else in stages"
CASES = {
    "right": (Model, (8,) * 4, ""),
    "wrong in parts": (OwnPlaces, (8,) * 4, IN_PARTS),
    "wrong in stages": (Calls, (8,) * 4, IN_STAGES),
    "wrong in both": (Both, (8,) * 4, IN_PARTS),
    "longer in the third step": (Model, (8, 12, 8, 8, 8, 24, 8, 8), IN_PARTS),
    "of another length in the second step": (Model, (8, 8, 8, 7), ""),
    "refused on one rank": (RefusingPart, (8,) * 4, "This part of a sequence is refused"),
}


def train(degrees: dict[str, int], kind: type[Model], lengths: tuple[int, ...], task: str) -> str:
    """Return the error of two micro-batches a step, or of an evaluation, on this rank; empty if there is none."""
    seed_everything(1, verbose=False)
    generator = torch.Generator().manual_seed(1)
    data: Any = [torch.randint(16, (2, length), generator=generator) for length in lengths]
    trainer = double_trainer(strategy=ParallelStrategy(**degrees), max_epochs=1, accumulate_grad_batches=2)
    loader: Any = DataLoader(data, batch_size=None)
    try:
        trainer.fit(kind(), loader) if task == "fit" else trainer.validate(kind(), loader, verbose=False)
    except (ModuleError, DataError) as error:
        return str(error)
    return ""


LAYOUTS: list[tuple[dict[str, int], list[str], list[str]]]
"""Degrees, what is fitted, and what is validated."""
if IS_SWEEP:
    some = ["right", "wrong in stages", "wrong in both", "longer in the third step"]
    LAYOUTS = [
        ({"pp": 2, "cp": 2}, list(CASES), list(CASES)),
        ({"pp": 2, "cp": 2, "tp": 2}, some, some),
        ({"pp": 2, "cp": 2, "dp_shard": 2}, some[:3], some[:3]),
    ]
else:  # the others have eight ranks
    LAYOUTS = [({"pp": 2, "cp": 2}, [name for name in CASES if name != "wrong in parts"], ["right", "wrong in both"])]


def train_all(degrees: dict[str, int], *names: list[str]) -> dict[tuple[str, str], str]:
    calm_down()
    return {
        (name, task): train(degrees, *CASES[name][:2], task)
        for task, some in zip(("fit", "validate"), names, strict=True)
        for name in some
    }


@pytest.mark.sweep
@pytest.mark.parametrize(("degrees", "fitted", "validated"), LAYOUTS, ids=[" x ".join(one[0]) for one in LAYOUTS])
def test_each_comparison_is_made_and_all_ranks_raise_what_it_finds(
    degrees: dict[str, int], fitted: list[str], validated: list[str]
) -> None:
    size = torch.tensor(list(degrees.values())).prod().item()
    for rank, found in enumerate(run_ranks(train_all, size, degrees, fitted, validated, timeout=500)):
        for (name, task), said in found.items():
            expected = CASES[name][2]
            assert re.search(expected, said) if expected else not said, (rank, name, task, said)
