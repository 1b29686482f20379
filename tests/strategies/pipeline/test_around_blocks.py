"""What stands around the blocks of a step in stages: checkpoints, hooks, metric objects, and lists of other modules."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torchmetrics
from sweep import IS_SWEEP
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from echelon import ParallelStrategy, Strategy, Trainer, TrainModule, seed_everything
from echelon.strategies.module.memory_estimate import expected_memory, held_memory
from echelon.testing import run_ranks


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.layer, self.drop = nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.drop(self.layer(self.norm(x)))
        return out


class Model(TrainModule):
    """Blocks in a ModuleDict, around them what is called by its parts, and a metric that is updated before them."""

    def __init__(self, dropout: float = 0.0, segment: int = 0, factor: float = 1.5) -> None:
        super().__init__()
        self.stem = nn.ModuleList([nn.Embedding(16, 8), nn.LayerNorm(8)])
        self.scales = nn.ParameterList([torch.ones(8)])
        self.layers = nn.ModuleDict({str(index): Block(dropout) for index in range(4)})
        self.heads = nn.ModuleDict({"first": nn.Linear(8, 16), "second": nn.Linear(8, 16)})
        self.tokens, self.mean = torchmetrics.SumMetric(), torchmetrics.MeanMetric()
        self.segment = segment
        """How many blocks stand in one checkpoint; 0 for none."""
        self.factor = factor
        """By which gradients are multiplied after each backward: the order of micro-batches shows then."""
        self.num_backwards, self.losses = 0, list[float]()

    def forward(self, tokens: Tensor) -> Tensor:
        self.tokens(float(tokens.numel()))
        x = self.stem[1](self.stem[0](tokens)) * self.scales[0]
        blocks = list(self.layers.values())
        if not (self.segment and self.training):
            x = nn.Sequential(*blocks)(x)
        for start in range(0, len(blocks), self.segment) if self.segment and self.training else ():
            x = checkpoint(nn.Sequential(*blocks[start : start + self.segment]), x, use_reentrant=False)
        return self.heads["first"](x) + self.heads["second"](x)

    def loss(self, tokens: Tensor) -> Tensor:
        self.mean(float(tokens.shape[0]))
        logits = self(tokens)
        if not self.training:
            self.log_dict({"tokens": self.tokens, "mean": self.mean})
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    def training_step(self, tokens: Tensor) -> Tensor:
        return self.loss(tokens)

    def validation_step(self, tokens: Tensor) -> None:
        self.log("val_loss", self.loss(tokens))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 1 and batch_idx == 3 else None  # in the middle of a step

    def on_after_backward(self) -> None:
        self.num_backwards += 1
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(self.factor)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())
        self.log("loss", outputs["loss"], on_step=True, on_epoch=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches() -> DataLoader[Tensor]:
    data: Any = torch.randint(16, (13, 5), generator=torch.Generator().manual_seed(1))
    return DataLoader(data, batch_size=2)  # four micro-batches a step, and then three, of which one has one sample


def train(strategy: str | Strategy, recomputed: Any = None, **options: Any) -> dict[str, Any]:
    seed_everything(2, verbose=False)
    module = Model(**options)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1 if strategy == "single" else "auto",
        accumulate_grad_batches=4,
        max_epochs=2,
        precision="64-true",
        activation_checkpointing=recomputed,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, batches(), batches())
    return {
        "state": trainer.strategy.ranks.all.broadcast(trainer.strategy.full_model_state()),
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "losses": module.losses,
        "backwards": module.num_backwards,
        "held": held_memory(module, []).parameters,
        "expected": expected_memory(module, [], trainer.strategy.memory_share).parameters,
    }


SEGMENTS = (1, 3, 4) if IS_SWEEP else (1, 3)
"""How many blocks are checkpointed together."""


def train_all() -> dict[str, Any]:
    make = partial(ParallelStrategy, pp=2)
    ends = {"plain": train(make()), "dropped": train(make(), dropout=0.3)}
    ends["in order"] = train(make(), dropout=0.3, factor=1.0)
    ends["in halves"] = train(make(schedule="zbv_zero_bubble"), recomputed="selective", dropout=0.3, factor=1.0)
    return ends | {f"segments of {size}": train(make(), dropout=0.3, segment=size) for size in SEGMENTS}


@pytest.fixture(scope="module")
def ends() -> list[dict[str, Any]]:
    """What each of two ranks has left of each run."""
    return run_ranks(train_all, 2, timeout=440)


@pytest.mark.only_in_sweep
def test_hooks_metrics_and_containers_are_those_of_one_process(ends: list[dict[str, Any]]) -> None:
    alone = train("single")
    everything = alone.pop("held")
    assert everything == alone.pop("expected")
    assert alone["metrics"]["tokens"] == 13 * 5
    assert alone["backwards"] == 7 + 3
    held = [end["plain"].pop("held") for end in ends]
    assert held == [end["plain"].pop("expected") for end in ends]
    assert sum(held) == everything + alone["state"]["scales.0"].nbytes  # which every stage has
    for end in ends:
        torch.testing.assert_close(end["plain"], alone, rtol=0, atol=1e-12)


@pytest.mark.sweep
@pytest.mark.parametrize("size", SEGMENTS)
def test_a_checkpoint_around_blocks_computes_with_the_random_numbers_of_forward(
    size: int, ends: list[dict[str, Any]]
) -> None:
    assert ends[0]["dropped"]["losses"] != ends[0]["plain"]["losses"]
    for end in ends:
        torch.testing.assert_close(end[f"segments of {size}"], end["dropped"], rtol=0, atol=1e-12)


def test_what_selective_checkpointing_keeps_once_takes_whole_backwards(ends: list[dict[str, Any]]) -> None:
    for name in ("state", "metrics", "losses", "backwards"):
        torch.testing.assert_close(ends[0]["in halves"][name], ends[0]["in order"][name], rtol=0, atol=1e-12)
