"""A program that trains in forks, kills each at a random moment, resumes, and compares with a run left in peace.

Run by test_ckpt_killed_training.py in a process of its own: forking wants a process without threads.
Usage: killed_training.py FOLDER KILLS
"""

from __future__ import annotations

import functools
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import ModelCheckpoint, Trainer, TrainModule
from echelon.trainer.checkpoint import list_checkpoints, newest_valid, verify


class Noisy(TrainModule):
    """A network whose result depends on weights, buffers, moments, random numbers and the order of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 300), nn.BatchNorm1d(300), nn.Dropout(0.2), nn.Linear(300, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = (self.net(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}


def train(folder: Path, *, epochs: int = 20) -> None:
    """Train from the last checkpoint on, saving every second step; the weights are left as ``weights.pt``."""
    torch.manual_seed(0)
    module = Noisy()
    dataset = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    trainer = Trainer(
        max_epochs=epochs,
        accumulate_grad_batches=2,
        callbacks=[ModelCheckpoint(dirpath=folder / "checkpoints", every_n_train_steps=2, save_last="link")],
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(dataset, batch_size=4, shuffle=True), ckpt_path="last")
    torch.save(module.state_dict(), folder / "weights.pt")


def fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:  # noqa: BLE001 - told by the exit status
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def until_done(work: Callable[[], None]) -> None:
    _, status = os.waitpid(fork(work), 0)
    assert status == 0, status


def main(folder: Path, kills: int) -> None:
    torch.set_num_threads(1)
    train(folder / "warm-up", epochs=1)  # what is imported now need not be imported by every fork
    until_done(lambda: train(folder / "peace"))
    chance = random.Random(0)
    war = folder / "war"
    for kill in range(kills):
        pid = fork(functools.partial(train, war))
        time.sleep(chance.uniform(0.01, 0.12))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        for checkpoint in list_checkpoints(war / "checkpoints"):
            verify(checkpoint.path)
        if not os.WIFSIGNALED(status):  # it was faster
            compare(war, folder / "peace")
            war = folder / f"war{kill}"
    until_done(lambda: train(war))
    compare(war, folder / "peace")


def compare(war: Path, peace: Path) -> None:
    ours, theirs = (torch.load(run / "weights.pt", weights_only=True) for run in (war, peace))
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert newest_valid(war / "checkpoints") is not None
    assert not [path for path in (war / "checkpoints").iterdir() if path.name.startswith(".")]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
