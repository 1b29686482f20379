"""A model whose training state exceeds what any process may hold is trained in shards, saved, and resumed."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import ModelCheckpoint, Trainer, TrainModule, seed_everything
from echelon.strategies.fsdp import FSDPStrategy
from echelon.testing import run_ranks
from echelon.trainer.checkpoint import load

WIDTH, DEPTH = 1024, 24
STATE = 16 * DEPTH * WIDTH * WIDTH
"""Bytes: a parameter, its gradient and two moments, each in float32."""
LIMIT = int(0.9 * STATE)
"""Bytes that a process may take beyond what it has when the run begins."""
LR = 1e-4
_M_MMAP_THRESHOLD = -3
"""In malloc.h: from which size on memory comes from the system, and goes back to it when it is freed."""


class Deep(TrainModule):
    """Many layers, built in the processes that train them."""

    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)]
            self.layers = nn.ModuleList(nn.Sequential(layer, nn.Tanh()) for layer in layers)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x: Tensor = batch[0]
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=LR, foreach=False)


def memory_of_data() -> int:
    """Return the bytes of this process that the limit counts: its own memory, and not files mapped to be read."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


def train(strategy: Any, folder: Path, steps: int, ckpt_path: str | None = None) -> int:
    """Train under the limit to this many steps with a checkpoint after each; return how many were taken."""
    # otherwise the C library keeps freed memory, and the ranks' needs depend on luck
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    torch.set_num_threads(1)  # each has a stack
    most = memory_of_data() + LIMIT
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    seed_everything(1, verbose=False)
    loader = DataLoader(TensorDataset(torch.randn(64, WIDTH)), 1)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=steps,
        global_batch_size=4,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Deep(), loader, ckpt_path=ckpt_path)
    return trainer.global_step


@pytest.mark.only_in_sweep  # a measurement
def test_shards_fit_where_the_whole_does_not(memory_path: Path) -> None:
    assert run_ranks(train, 4, FSDPStrategy(), memory_path, 1) == [1] * 4
    assert run_ranks(train, 4, FSDPStrategy(), memory_path, 2, "last") == [2] * 4
    states = [load(memory_path / f"epoch=0-step={step}.ckpt", lazy=["model", "optimizers"]) for step in (1, 2)]
    for step, state in enumerate(states, start=1):
        moments = state["optimizers"][0]["state"]
        assert state["model"].keys() == moments.keys()
        assert len(moments) == DEPTH
        assert all(moment["step"] == step and moment["exp_avg"].shape == (WIDTH, WIDTH) for moment in moments.values())
    name = next(iter(states[0]["model"]))
    change = (states[1]["model"][name].clone() - states[0]["model"][name]).abs()
    assert 0 < change.max() < 2 * LR
    with pytest.raises((MemoryError, RuntimeError), match="memory"):
        run_ranks(train, 1, "single", memory_path, 1)
