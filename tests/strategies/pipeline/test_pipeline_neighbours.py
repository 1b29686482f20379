"""Features combined with a pipeline: averaged weights, deferred building, shards under several stages per rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from echelon import (
    EMAWeightAveraging,
    ModelCheckpoint,
    ParallelStrategy,
    Strategy,
    Trainer,
    TrainModule,
    seed_everything,
)
from echelon.testing import run_ranks

DECAY = 0.5


class Block(nn.Module):
    """A layer, and a buffer that tracks its inputs in training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(8), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += x.detach().mean()
        out: Tensor = x + self.layer(self.norm(x)).tanh()
        return out


class Model(TrainModule):
    """A table, four blocks and a head, built late if that is asked for."""

    def __init__(self, *, is_late: bool = False) -> None:
        super().__init__()
        if not is_late:
            self.configure_model()

    def configure_model(self) -> None:
        if not hasattr(self, "table"):
            self.table, self.blocks = nn.Embedding(16, 8), nn.ModuleList(Block() for _ in range(4))
            self.head = nn.Linear(8, 16)

    def training_step(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())

    def validation_step(self, tokens: Tensor) -> None:
        self.log("loss/val", self.training_step(tokens))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train(
    strategy: str | Strategy,
    folder: Path,
    *,
    max_epochs: int,
    is_late: bool = False,
    ckpt_path: Path | None = None,
) -> dict[str, Any]:
    """Train with averaged weights in steps of eight samples; return the average as it was validated and is left."""
    seed_everything(2, verbose=False)
    average = EMAWeightAveraging(device="cpu", decay=DECAY)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1 if strategy == "single" else "auto",
        precision="64-true",
        accumulate_grad_batches=4,
        max_epochs=max_epochs,
        callbacks=[average, ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    samples: Any = torch.randint(16, (30, 5), generator=torch.Generator().manual_seed(1))
    loader: DataLoader[Any] = DataLoader(samples, batch_size=2)
    trainer.fit(Model(is_late=is_late), loader, loader, ckpt_path=ckpt_path)
    state = trainer.strategy.ranks.all.broadcast(trainer.strategy.full_model_state())
    return {"state": state, "loss": trainer.callback_metrics["loss/val"]}


def train_in_stages(folder: Path) -> dict[str, Any]:
    """Train on four stages; continue with two stages per rank, each sharded over two ranks, and deferred building."""
    first = train(ParallelStrategy(pp=4), folder, max_epochs=2)
    below = ParallelStrategy(pp=2, dp_shard=2, schedule="interleaved_1f1b", deferred_init=True)
    saved = folder / "epoch=1.ckpt"
    second = train(below, folder / "second", max_epochs=3, is_late=True, ckpt_path=saved)
    return {"four stages": first, "shards below": second}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four ranks has left of each run."""
    return run_ranks(train_in_stages, 4, tmp_path_factory.mktemp("stages"), timeout=440)


def test_averages_of_all_stages_are_validated_saved_and_left_in_the_module(
    ends: list[dict[str, Any]], tmp_path: Path
) -> None:
    alone = train("single", tmp_path, max_epochs=2)
    assert float(alone["state"]["blocks.3.seen"]) != 0
    for end in ends:
        torch.testing.assert_close(end["four stages"], alone, rtol=0, atol=1e-12)


def test_several_stages_a_rank_with_shards_go_on_with_the_averages_that_were_saved(
    ends: list[dict[str, Any]], tmp_path: Path
) -> None:
    alone = train("single", tmp_path, max_epochs=3)
    # a buffer follows the samples of one data rank
    parameters = {name: value for name, value in alone["state"].items() if "seen" not in name}
    for end in ends:
        found = {name: end["shards below"]["state"][name] for name in parameters}
        torch.testing.assert_close(found, parameters, rtol=0, atol=1e-12)
        torch.testing.assert_close(end["shards below"]["loss"], alone["loss"], rtol=0, atol=1e-12)
