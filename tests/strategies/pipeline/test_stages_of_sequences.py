"""Pipelines whose stages cut sequences: both exchanges, schedules, recomputation, evaluations, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sweep import IS_SWEEP
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from echelon import (
    Loss,
    ModelCheckpoint,
    ModuleError,
    ParallelStrategy,
    Strategy,
    Trainer,
    TrainModule,
    seed_everything,
)
from echelon.testing import run_ranks

LENGTHS = (8, 12, 5, 9, 6, 7, 16, 11, 2, 8)
"""Of the sequences of ten micro-batches, four a step: a part of each is another length, some a token more on a rank."""
PADDED = 3
"""The number of tokens at the end of each sequence that count nothing: more than all of a part have."""


class Block(nn.Module):
    """Attention over the whole sequence whose queries and keys know their places, asked for where they are used."""

    def __init__(self, positions: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.positions = positions

    def forward(self, x: Tensor) -> Tensor:
        turned = 1 + 0.3 * self.positions(x.shape[1]).to(x)[:, None].cos()
        q, k, v = (part.unflatten(-1, (-1, 2)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q * turned, k * turned, v, is_causal=True)
        out: Tensor = x + self.out(y.transpose(1, 2).flatten(2))
        return out


class Model(TrainModule):
    """A small language model; the last tokens of a sequence count nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block(self.positions) for _ in range(4))
        self.head = nn.Linear(8, 16)
        self.losses: list[float] = []

    def positions(self, length: int) -> Tensor:
        places: Tensor = self.trainer.strategy.positions(length)
        return places

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits

    def loss_of(self, batch: dict[str, Tensor]) -> Any:
        counts = batch["target"] >= 0
        errors = F.cross_entropy(
            self(batch["tokens"]).flatten(0, 1), batch["target"].flatten(), ignore_index=-1, reduction="sum"
        )
        return Loss(errors, counts.sum())

    def training_step(self, batch: dict[str, Tensor]) -> Any:
        loss = self.loss_of(batch)
        self.log("total", loss.total, reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("tokens", float(batch["tokens"].numel()), reduce_fx="sum", on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        self.log("certainty", self(batch["tokens"]).softmax(-1).max(), reduce_fx="max")
        self.log("seen", float(batch["tokens"].numel()), reduce_fx="sum")

    def test_step(self, batch: dict[str, Tensor]) -> None:
        self.log("test_total", self.loss_of(batch).total, reduce_fx="sum")

    def predict_step(self, batch: dict[str, Tensor]) -> Tensor:
        return self(batch["tokens"]).argmax(-1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class OwnPositions(Model):
    """A mistake in the third block, which lies on the second stage."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].positions = torch.arange


class MeanOfParts(Model):
    """Returns a mean, though parts have different numbers of counting tokens, some of them none."""

    def loss_of(self, batch: dict[str, Tensor]) -> Any:
        return F.cross_entropy(self(batch["tokens"]).flatten(0, 1), batch["target"].flatten(), ignore_index=-1)

    def training_step(self, batch: dict[str, Tensor]) -> Any:
        return self.loss_of(batch)

    def validation_step(self, batch: dict[str, Tensor]) -> Any:
        return self.loss_of(batch)


def batches(lengths: tuple[int, ...] = LENGTHS) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    data: Any = []
    for length in lengths:
        tokens = torch.randint(16, (2, length + 1), generator=generator)
        target = tokens[:, 1:].clone()
        target[:, -PADDED:] = -1
        data.append({"tokens": tokens[:, :-1], "target": target})
    return DataLoader(data, batch_size=None)


def make_trainer(strategy: str | Strategy, **options: Any) -> Trainer:
    return Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1 if strategy == "single" else "auto",
        precision="64-true",
        accumulate_grad_batches=4,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def train(
    strategy: str | Strategy, folder: Path, ckpt_path: Path | None = None, *, evaluates: bool = True, **options: Any
) -> dict[str, Any]:
    """Train an epoch, test and predict in this process; return what is left on this rank."""
    seed_everything(2, verbose=False)
    module = Model()
    saving = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[saving], gradient_clip_val=0.5, **options)
    trainer.fit(module, batches(), batches((8, 4, 6)), ckpt_path=ckpt_path)
    state = trainer.strategy.ranks.all.broadcast(trainer.strategy.full_model_state())
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    if evaluates:
        metrics |= trainer.test(module, batches((4, 8)), verbose=False)[0]
    predicted = trainer.predict(module, batches((8, 7, 4))) if evaluates else None
    return {"state": state, "metrics": metrics, "predicted": predicted}


RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "1f1b": ({}, {}),
    "gpipe, ulysses, computed again": (
        {"schedule": "gpipe", "cp_exchange": "ulysses"},
        {"activation_checkpointing": "full"},
    ),
    "interleaved, computed again": ({"schedule": "interleaved_1f1b"}, {"activation_checkpointing": "full"}),
    "zero bubble": ({"schedule": "zbv_zero_bubble"}, {}),
    "zero bubble, ulysses, computed again": (
        {"schedule": "interleaved_zero_bubble", "cp_exchange": "ulysses"},
        {"activation_checkpointing": "full"},
    ),
}


TESTED = RUNS if IS_SWEEP else {name: RUNS[name] for name in ("1f1b", "zero bubble, ulysses, computed again")}
EVALUATED = ("1f1b",) * IS_SWEEP + ("zero bubble, ulysses, computed again", "resumed")
"""Runs after which sequences are tested and predicted as well: with each exchange, and without stages."""


def train_all(folder: Path) -> dict[str, Any]:
    ends = {
        name: train(ParallelStrategy(pp=2, cp=2, **degrees), folder / name, evaluates=name in EVALUATED, **options)
        for name, (degrees, options) in TESTED.items()
    }
    saved = folder / "1f1b" / "epoch=0-step=2.ckpt"
    ends["resumed"] = train(ParallelStrategy(cp=2), folder / "resumed", ckpt_path=saved)
    return ends


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four ranks has left of each run."""
    return run_ranks(train_all, 4, tmp_path_factory.mktemp("runs"), timeout=540)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train("single", tmp_path_factory.mktemp("alone"))


@pytest.mark.sweep
@pytest.mark.parametrize("name", [*TESTED, "resumed"])
def test_stages_of_cut_sequences_end_like_one_process_on_every_rank(
    name: str, ends: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    if name != "resumed":  # an epoch that is resumed in its middle has in part been logged elsewhere
        assert alone["metrics"]["tokens"] == 2 * sum(LENGTHS)
    for end in ends:
        found, metrics = end[name], dict(alone["metrics"])
        torch.testing.assert_close(found["state"], alone["state"], rtol=0, atol=1e-12)
        if name in EVALUATED:
            torch.testing.assert_close(found["predicted"], alone["predicted"])
        else:
            del metrics["test_total"]
        torch.testing.assert_close(found["metrics"], metrics, rtol=1e-6, atol=1e-6)


def train_on_means(strategy: str | Strategy) -> dict[str, Tensor]:
    """Train a step on means of micro-batches with different numbers of counting tokens; return the weights."""
    seed_everything(2, verbose=False)
    trainer = make_trainer(strategy, max_steps=1, enable_checkpointing=False)
    trainer.fit(MeanOfParts(), batches((4, 8, 4, 12)))
    state: dict[str, Tensor] = trainer.strategy.ranks.all.broadcast(trainer.strategy.full_model_state())
    return state


def mistakes(folder: Path) -> dict[str, Any]:
    """Return this rank's message for each mistake, and what it has after a step on means of parts."""
    told: dict[str, Any] = {"MeanOfParts": train_on_means(ParallelStrategy(pp=2, cp=2))}
    seed_everything(2, verbose=False)
    trainer = make_trainer(ParallelStrategy(pp=2, cp=2), max_steps=1, enable_checkpointing=False)
    with pytest.raises(ModuleError) as caught:
        trainer.fit(OwnPositions(), batches(LENGTHS))
    told["OwnPositions"] = str(caught.value)
    trainer = make_trainer(ParallelStrategy(pp=2, cp=2), enable_checkpointing=False)
    with pytest.raises(ModuleError) as caught:
        trainer.validate(OwnPositions(), batches((8,)))
    told["validate"] = str(caught.value)
    nothing_counts = make_trainer(ParallelStrategy(pp=2, dp_shard=2), max_steps=1, enable_checkpointing=False)
    nothing_counts.fit(MeanOfParts(), batches((PADDED,) * 8))
    told["steps without a token that counts"] = str(nothing_counts.global_step)
    nothing_counts.validate(MeanOfParts(), batches((PADDED, 8, PADDED, 8)), verbose=False)  # on one data rank of two
    return told


@pytest.mark.only_in_sweep  # test_stages_and_parts.py has each comparison
def test_the_first_step_compares_the_parts_of_all_stages_with_whole_sequences(tmp_path: Path) -> None:
    alone = train_on_means("single")
    for told in run_ranks(mistakes, 4, tmp_path, timeout=300):
        assert "parts of a sequence (cp=2) than from the whole: the first output that differs" in told["OwnPositions"]
        assert "is that of blocks.2" in told["OwnPositions"]
        assert told["validate"] == told["OwnPositions"]
        torch.testing.assert_close(told["MeanOfParts"], alone, rtol=0, atol=1e-12)
        assert told["steps without a token that counts"] == "1"  # their NaN is not blamed on a part elsewhere
