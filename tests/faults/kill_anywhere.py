"""A program that trains in forks, kills each at a chosen moment, resumes it, and compares it with an undisturbed run.

Run by test_kill_anywhere.py in a process of its own: forking wants a process without threads, which has imported torch
once for all forks. Usage: kill_anywhere.py FOLDER KILLS; prints where each kill landed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from echelon import CSVLogger, ModelCheckpoint, Trainer, TrainModule, seed_everything
from echelon.common.errors import CheckpointError
from echelon.trainer import checkpoint

EPOCHS, STEPS_OF_EPOCH = 5, 8
CHECKPOINTS = Path("csv", "version_0", "checkpoints")


class Augmented(Dataset[Any]):
    """Samples that are changed at random, by every generator, whenever they are read."""

    def __len__(self) -> int:
        return 63

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(4) + random.gauss(0.0, 1.0) + torch.from_numpy(np.random.randn(4).astype("float32"))
        return noise + index / 10, torch.tensor([index / 10])


class Noisy(TrainModule):
    """A network whose result depends on weights, buffers, moments, random numbers and the order of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 200), nn.BatchNorm1d(200), nn.Dropout(0.2), nn.Linear(200, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = (self.net(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", (self.net(batch[0]) - batch[1]).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(folder: Path, *, epochs: int = EPOCHS) -> None:
    """Train from the last checkpoint on, saving every third step in the background; leave the weights."""
    seed_everything(0)  # after a fork, Python reseeds its own generator
    module = Noisy()
    trainer = Trainer(
        max_epochs=epochs,
        accumulate_grad_batches=2,
        callbacks=[ModelCheckpoint(monitor="step", mode="max", every_n_train_steps=3, save_last=True, save_top_k=2)],
        default_root_dir=folder,
        accelerator="cpu",
        logger=CSVLogger(folder, "csv", version=0),
        log_every_n_steps=1,
        val_check_interval=0.5,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loaders = (DataLoader(Augmented(), 4, shuffle=True), DataLoader(Augmented(), 32))
    trainer.fit(module, *loaders, ckpt_path="last")
    torch.save(module.state_dict(), folder / "weights.pt")


# --- where a process is, as its files tell; read while it is stopped


def progress(folder: Path, pid: int) -> str:
    """Say what a process is writing to its checkpoints now; empty if nothing."""
    for name in (name for name in entries(folder) if f".{pid}." in name):
        path = folder / CHECKPOINTS / name
        if name.endswith(".gone"):
            return "removing an old checkpoint"
        if name.endswith(".new") and path.is_symlink():
            return "replacing last.ckpt"
        if name.endswith(".new"):
            files = entries_of(path)
            return f"writing, {'with' if 'manifest.json' in files else 'before'} the manifest"
    return ""


def entries(folder: Path) -> list[str]:
    return entries_of(folder / CHECKPOINTS)


def entries_of(folder: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return os.listdir(folder)
    return []


@dataclass
class Kill:
    """What became of one fork."""

    status: int
    where: str = ""

    @property
    def has_landed(self) -> bool:
        return os.WIFSIGNALED(self.status)


def kill_at(pid: int, folder: Path, wanted: str, skip: int, patience: float) -> Kill:
    """Kill a process when its files say that it is where we want it, for the n-th time, or when patience is over."""
    end, before = time.monotonic() + patience, ""
    while True:
        now = progress(folder, pid)
        if now.startswith(wanted) and now != before:
            skip -= 1
        before = now
        if (skip < 0 and now) or time.monotonic() > end:
            os.kill(pid, signal.SIGSTOP)
            _, status = os.waitpid(pid, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                return Kill(status)
            where = progress(folder, pid)
            if (where.startswith(wanted) and where) or time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
                return Kill(os.waitpid(pid, 0)[1], where or "between writes")
            os.kill(pid, signal.SIGCONT)
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return Kill(status)
        time.sleep(1e-4)  # the fork may need this core


def moments(chance: random.Random) -> Iterator[tuple[str, int, float]]:
    """Yield where to kill: three times out of five inside a write, otherwise at any time."""
    while True:
        for wanted in chance.sample(["writing, before", "writing, with", "removing"], 3):
            yield wanted, chance.randrange(2), 20.0
        yield "replacing", 0, chance.uniform(0.0, 0.5)  # too short to be met each time
        yield "nothing", 0, chance.uniform(0.0, 0.3)


# --- the war


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
    assert status == 0, f"a fork that was not killed ended with status {status}"


def main(folder: Path, kills: int) -> None:
    torch.set_num_threads(1)
    train(folder / "warm-up", epochs=1)  # what is imported now need not be imported by every fork
    peace = folder / "peace"
    until_done(lambda: train(peace))
    chance, landed, wars = random.Random(0), Counter[str](), 0
    when = moments(chance)
    war = folder / "war0"
    while landed.total() < kills:
        kill = kill_at(fork(functools.partial(train, war)), war, *next(when))
        if kill.has_landed:
            landed[kill.where] += 1
            print(f"{landed.total()}: {war.name}, {kill.where}; {sorted(entries(war))}", flush=True)
            check_checkpoints(war)
            continue
        assert kill.status == 0, f"the fork ended with status {kill.status} by itself"
        compare(war, peace)  # it was faster
        wars += 1
        war = folder / f"war{wars}"
    until_done(lambda: train(war))
    compare(war, peace)
    print(f"landed: {dict(landed)}, in {wars + 1} runs", flush=True)
    assert sum(count for where, count in landed.items() if where != "between writes") >= kills // 2


def check_checkpoints(folder: Path) -> None:
    """Every checkpoint verifies, or is passed over with a reason; last.ckpt points to one of them."""
    for found in checkpoint.list_checkpoints(folder / CHECKPOINTS):
        try:
            checkpoint.verify(found.path)
        except CheckpointError as error:
            raise AssertionError(f"a kill damaged {found.path}: {error}") from error
    link = folder / CHECKPOINTS / "last.ckpt"
    if link.is_symlink():
        checkpoint.verify(link)


def compare(war: Path, peace: Path) -> None:
    """Weights, curve and what is kept are those of the undisturbed run."""
    compare_weights_and_kept(war, peace)
    ours, theirs = ((run / "csv" / "version_0" / "metrics.csv").read_text().splitlines() for run in (war, peace))
    assert ours == theirs, f"the curves differ: {set(ours) ^ set(theirs)}"
    assert len(theirs) == 1 + EPOCHS * (STEPS_OF_EPOCH + 3)  # 2 validations and the end of each epoch


def compare_weights_and_kept(war: Path, peace: Path) -> None:
    """Weights, bitwise, and the checkpoints that are kept are those of the undisturbed run."""
    ours, theirs = (torch.load(run / "weights.pt", weights_only=True) for run in (war, peace))
    different = [name for name, value in theirs.items() if not torch.equal(ours[name], value)]
    assert not different, f"weights differ: {different}"
    # hidden files are those that the next save would have cleared away
    ours, theirs = (sorted(name for name in entries(run) if not name.startswith(".")) for run in (war, peace))
    assert ours == theirs, f"kept were {ours}, not {theirs}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
