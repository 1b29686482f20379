"""A pipeline of two processes: many window shapes, dropout and metrics across a resume, loss scaling, and faults."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from echelon import (
    ConfigError,
    ModelCheckpoint,
    ModuleError,
    ParallelStrategy,
    ProcessError,
    Strategy,
    Trainer,
    TrainModule,
    seed_everything,
)
from echelon.testing import run_ranks

LENGTHS = (3, 5, 4, 3, 3, 6, 7, 5, 4, 2, 3, 5, 8, 4)
"""Of the sequences of 14 micro-batches, four a step: no two steps have the same, and the last has two."""


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.layer, self.drop = nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.drop(self.layer(self.norm(x)))
        return out


class Model(TrainModule):
    def __init__(self, dropout: float = 0.0, fault: str = "") -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(16, 8), nn.ModuleList(Block(dropout) for _ in range(4))
        self.head = nn.Linear(8, 16)
        self.fault, self.losses = fault, list[float]()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) * (1 + torch.rand(()))  # a draw of the step itself, the same on all stages
        for block in self.blocks:
            x = block(x)
        if self.fault == "raises" and self.training:
            raise ValueError("a fault behind the last block")
        if self.fault == "dies" and self.training:
            os.kill(os.getpid(), signal.SIGKILL)
        logits: Tensor = self.head(x)
        return logits

    def training_step(self, tokens: Tensor) -> Tensor:
        self.log("length", float(tokens.shape[1]), reduce_fx="sum", on_step=False, on_epoch=True)
        loss = nn.functional.cross_entropy(self(tokens).flatten(0, 1), tokens.flatten())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, tokens: Tensor) -> None:
        self.log("certainty", self(tokens).softmax(-1).max())

    def predict_step(self, tokens: Tensor) -> Tensor:
        return self(tokens).argmax(-1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def batches() -> DataLoader[Tensor]:
    generator = torch.Generator().manual_seed(1)
    data: Any = [torch.randint(16, (2, length), generator=generator) for length in LENGTHS]
    return DataLoader(data, batch_size=None)


def train(
    strategy: str | Strategy, folder: Path, *, dropout: float = 0.0, ckpt_path: Path | None = None, **options: Any
) -> dict[str, Any]:
    """Train an epoch and predict in this process; return what is left on this rank."""
    seed_everything(2, verbose=False)
    module = Model(dropout)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1 if strategy == "single" else "auto",
        accumulate_grad_batches=4,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"precision": "64-true", "max_epochs": 1, **options},
    )
    trainer.fit(module, batches(), batches(), ckpt_path=ckpt_path)
    state = trainer.strategy.ranks.all.broadcast(trainer.strategy.full_model_state())
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    torch.manual_seed(0)
    return {
        "state": state,
        "metrics": metrics,
        "losses": module.losses,
        "predicted": trainer.predict(module, batches()),
    }


def train_all(folder: Path) -> dict[str, Any]:
    make = partial(ParallelStrategy, pp=2)
    saved = folder / "dropped" / "epoch=0-step=2.ckpt"
    return {
        "plain": train(make(), folder / "plain"),
        "zero bubble": train(make(schedule="zbv_zero_bubble"), folder / "zero bubble"),
        # the metrics of an epoch that is resumed in its middle are not those of the whole one
        "dropped": train(make(), folder / "dropped", dropout=0.3, max_epochs=2),
        "resumed": train(make(schedule="gpipe"), folder / "resumed", dropout=0.3, ckpt_path=saved, max_epochs=2),
        "scaled": train(make(), folder / "scaled", precision="16-mixed"),
    }


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks has left of each run."""
    return run_ranks(train_all, 2, tmp_path_factory.mktemp("runs"), timeout=440)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train("single", tmp_path_factory.mktemp("alone"))


def check(end: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(end["state"], expected["state"], rtol=0, atol=1e-12)
    torch.testing.assert_close(end["metrics"], expected["metrics"], rtol=0, atol=1e-6)
    torch.testing.assert_close(end["predicted"], expected["predicted"])


@pytest.mark.parametrize("name", ["plain", "zero bubble"])
def test_windows_of_many_shapes_end_like_one_process_on_every_rank(
    name: str, ends: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    assert alone["metrics"]["length"] == sum(LENGTHS)
    for end in ends:
        check(end[name], alone)
        torch.testing.assert_close(end[name]["losses"], alone["losses"], rtol=0, atol=1e-6)


def test_a_resume_under_another_schedule_goes_on_with_the_same_dropout(ends: list[dict[str, Any]]) -> None:
    for end in ends:
        check(end["resumed"], end["dropped"])
        assert end["resumed"]["losses"] == end["dropped"]["losses"][8:]
    assert ends[0]["dropped"]["losses"] != ends[0]["plain"]["losses"]


def test_loss_scaling_agrees_on_all_stages(ends: list[dict[str, Any]], tmp_path: Path) -> None:
    alone = train("single", tmp_path, precision="16-mixed")
    assert ends[0]["scaled"]["losses"] == pytest.approx(ends[1]["scaled"]["losses"])
    assert ends[0]["scaled"]["losses"] == pytest.approx(alone["losses"], abs=0.02)


def fit(fault: str) -> None:
    trainer = Trainer(
        strategy="pp",
        accelerator="cpu",
        devices=2,
        accumulate_grad_batches=4,
        max_steps=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Model(fault=fault), batches())


def test_a_stage_that_raises_ends_the_run_and_is_named() -> None:
    with pytest.raises(ValueError, match="a fault behind the last block") as caught:
        fit("raises")
    notes = "\n".join(caught.value.__notes__)
    assert "In the forward of micro-batch 0 on stage 1 of 2" in notes
    assert "Raised on rank 1 of 2" in notes
    assert "Rank 1 has stage 1 of 2." in notes


def test_a_stage_that_dies_ends_the_run_and_is_named() -> None:
    with pytest.raises(ProcessError, match="Rank 1 of 2 .* was killed by SIGKILL") as caught:
        fit("dies")
    assert caught.value.ranks == (1,)
    assert "Rank 1 has stage 1 of 2." in caught.value.__notes__


def test_too_few_micro_batches_are_refused_before_a_process_starts() -> None:
    trainer = Trainer(strategy="pp", accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
    with pytest.raises(ConfigError, match="accumulate_grad_batches must be at least 2") as caught:
        trainer.fit(Model(), batches())
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize(
    ("name", "part", "message"),
    [
        ("temperature", nn.Parameter(torch.ones(())), "temperature of Model must have a dimension if layers are cut"),
        ("table", nn.Embedding(16, 8, sparse=True), "table of Model must have dense gradients to shard them"),
    ],
)
def test_what_cannot_be_sharded_is_refused_before_a_process_starts(name: str, part: Any, message: str) -> None:
    module = Model()
    setattr(module, name, part)
    trainer = Trainer(strategy="pp", accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
    with pytest.raises(ModuleError, match=message) as caught:
        trainer.fit(module, batches())
    assert not hasattr(caught.value, "__notes__")
