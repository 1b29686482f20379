"""Experts with a capacity drop the same tokens on any number of ranks, and however a step is cut."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from recording_logger import RecordingLogger
from small import quiet, raises
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import ConfigError, ExpertBalance, Experts, ParallelStrategy, TrainModule, seed_everything
from echelon.testing import run_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(6), Experts(6, 4, 4, shared_hidden=3, capacity=2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.experts(self.norm(x))
        return out


class Limited(TrainModule):
    """Sequences of five tokens, of which an expert takes two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(1, 6), nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(6, 1)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        x = self.first(batch[0][..., None])
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(self.last(x).mean(1), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.03)


class Late(Limited):
    """Built where the strategy decides."""

    def __init__(self) -> None:
        TrainModule.__init__(self)

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            Limited.__init__(self)


def train(folder: str, strategy: Any, batch_size: int = 2) -> tuple[dict[str, Tensor], list[Any], Any]:
    """Train on 29 samples in global batches of 8; return the weights, what was logged, and the last counts."""
    seed_everything(2, verbose=False)
    x = torch.randn(29, 5, generator=torch.Generator().manual_seed(1)).double()
    data = DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_size)
    logger, balance = RecordingLogger(folder), ExpertBalance(0.01)
    trainer = quiet(
        strategy=strategy(), precision="64-true", max_epochs=1, global_batch_size=8, gradient_clip_val=0.5,
        logger=logger, log_every_n_steps=1, callbacks=balance, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Limited(), data)
    names = ("experts/imbalance", "experts/unused", "experts/dropped")
    return trainer.strategy.full_model_state(), [logger.series(name) for name in names], balance.tokens


def train_on_ranks(folder: str) -> list[Any]:
    layouts = ({"dp_shard": 4, "ep": 2}, {"pp": 2, "dp_shard": 2, "ep": 2})
    return [train(folder, partial(ParallelStrategy, **degrees)) for degrees in layouts]


def test_the_same_tokens_are_dropped_on_all_layouts(tmp_path: Any) -> None:
    state, logged, tokens = train(str(tmp_path), lambda: "single")
    assert all(0 < dropped < 8 * 5 * 2 * 2 for _, dropped in logged[2])
    assert {name: sum(numbers) for name, numbers in tokens.items()} == {
        f"blocks.{index}.experts.stack": 5 * 5 * 2
        for index in range(2)  # of the 5 samples of the last step
    }
    again = train(str(tmp_path), lambda: "single", 8)
    torch.testing.assert_close(again[0], state, rtol=0, atol=1e-12)
    assert again[1:] == (logged, tokens)
    for own, also_logged, counted in run_ranks(train_on_ranks, 4, str(tmp_path))[0]:
        torch.testing.assert_close(own, state, rtol=0, atol=1e-12)
        assert (also_logged, counted) == (logged, tokens)


def test_a_capacity_is_refused_where_sequences_are_cut() -> None:
    for module in (Limited(), Late()):
        with raises(ConfigError, "cp=2 leaves each rank a part of a sequence, but blocks.0.experts has capacity=2"):
            quiet(strategy=ParallelStrategy(cp=2), devices=2).fit(module, DataLoader(TensorDataset(torch.zeros(4, 5))))
