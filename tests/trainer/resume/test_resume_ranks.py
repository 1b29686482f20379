"""A run of several processes continues where it stopped: with as many, with more, with one, and after a kill."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Callback, ModelCheckpoint, Trainer, TrainModule, seed_everything
from echelon.common.errors import CheckpointError, ProcessError
from echelon.trainer.checkpoint import list_checkpoints, load, verify


class Dropping(TrainModule):
    """Draws from every rank's generator, notes what that would give first in a step, and has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
        self.first: float | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.first is None:
            state = torch.get_rng_state()
            self.first = torch.rand(()).item()
            torch.set_rng_state(state)
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


class Draws(Callback):
    """Gathers what each rank's generator would have given in its first step, and dies where it is told to."""

    def __init__(self, dies_at: int | None = None) -> None:
        self.draws: list[float] = []
        self.dies_at = dies_at

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        if not self.draws:
            self.draws = trainer.strategy.all_gather_object(module.first)
        if trainer.global_step == self.dies_at and trainer.strategy.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def state_dict(self) -> dict[str, Any]:
        return {"draws": self.draws}

    def load_state_dict(self, state_dict: Any) -> None:
        """Draw again in every part of a run."""


def fit(
    folder: Path, steps: int, devices: int, ckpt_path: str | None = None, dies_at: int | None = None
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train to this many steps with a checkpoint at each; return the weights, and what ranks would draw first."""
    seed_everything(3, verbose=False)
    module = Dropping()
    data = TensorDataset(torch.randn(48, 4).double(), torch.randn(48, 1).double())
    saver = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, save_last=True)
    trainer = Trainer(
        strategy="ddp" if devices > 1 else "single",
        devices=devices,
        accelerator="cpu",
        max_steps=steps,
        global_batch_size=12,
        callbacks=[Draws(dies_at), saver],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, 12 // devices, shuffle=True), ckpt_path=ckpt_path)
    assert trainer.global_step == steps
    states = load(folder / "last.ckpt")["callbacks"]
    draws: list[float] = next(state["draws"] for state in states.values() if "draws" in state)
    return module.state_dict(), draws


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    fit(folder, 3, devices=2)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return fit(tmp_path_factory.mktemp("whole"), 6, devices=2)[0]


@pytest.fixture(scope="module")
def resumed(stopped: Path) -> tuple[dict[str, torch.Tensor], list[float]]:
    return fit(stopped, 6, 2, ckpt_path=str(stopped / "epoch=0-step=3.ckpt"))


def test_a_run_of_two_processes_goes_on_to_the_bit_as_if_it_had_not_stopped(
    stopped: Path, whole: dict[str, torch.Tensor], resumed: tuple[dict[str, torch.Tensor], list[float]]
) -> None:
    weights, draws = resumed
    for name, value in whole.items():
        assert torch.equal(weights[name], value), name
    saved = load(stopped / "epoch=0-step=3.ckpt")["rng"]
    assert len(saved) == 2
    for state, draw in zip(saved, draws, strict=True):
        assert torch.rand((), generator=torch.Generator().set_state(state["torch"].clone())).item() == draw


def test_ranks_that_were_not_there_before_draw_something_of_their_own(
    stopped: Path, resumed: tuple[dict[str, torch.Tensor], list[float]]
) -> None:
    _, two = resumed
    _, three = fit(stopped, 4, 3, ckpt_path=str(stopped / "epoch=0-step=3.ckpt"))
    assert three[:2] == two
    assert len(set(three)) == 3


def test_one_process_goes_on_with_what_two_have_saved(stopped: Path) -> None:
    path = stopped / "epoch=0-step=3.ckpt"
    weights, draws = fit(stopped, 4, 1, ckpt_path=str(path))
    assert len(draws) == 1
    assert all(torch.isfinite(value).all() for value in weights.values())


def test_a_damaged_checkpoint_is_one_error_and_no_hang(stopped: Path, tmp_path: Path) -> None:
    path = tmp_path / "damaged.ckpt"
    shutil.copytree(stopped / "epoch=0-step=3.ckpt", path)
    content = bytearray((path / "optimizers.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "optimizers.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"optimizers.safetensors has the hash \w+,"):
        fit(tmp_path, 4, 2, ckpt_path=str(path))


def test_a_rank_that_is_killed_costs_no_checkpoint(tmp_path: Path, whole: dict[str, torch.Tensor]) -> None:
    began = time.monotonic()
    with pytest.raises(ProcessError, match="Rank 1 of 2"):
        fit(tmp_path, 6, 2, dies_at=4)
    assert time.monotonic() - began < 240
    found = [checkpoint.path for checkpoint in list_checkpoints(tmp_path)]
    assert {path.name for path in found} >= {f"epoch=0-step={step}.ckpt" for step in (1, 2, 3)}
    for path in found:
        verify(path)
    resumed, _ = fit(tmp_path, 6, 2, ckpt_path="last")
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
