"""A program that trains in forks and sends them signals; prints how each ended, and what it left behind.

Run by test_exit_codes.py in a process of its own: it imports torch once for all forks.
Usage: signalled.py FOLDER [CASE ...]
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Callback, ModelCheckpoint, Trainer, TrainModule, seed_everything
from echelon.strategies.launch.signal_handlers import ECHO
from echelon.strategies.torch_internals.distributed import kill_with_parent
from echelon.trainer import checkpoint

CASES: dict[str, tuple[list[signal.Signals], bool]] = {
    "SIGTERM": ([signal.SIGTERM], False),
    "SIGUSR1": ([signal.SIGUSR1], False),
    "SIGINT": ([signal.SIGINT], False),
    "SIGTERM, SIGTERM": ([signal.SIGTERM, signal.SIGTERM], True),
    "SIGINT, SIGINT": ([signal.SIGINT, signal.SIGINT], True),
    "SIGUSR1, SIGTERM": ([signal.SIGUSR1, signal.SIGTERM], True),
}
"""The signals, and whether the step in which they come never ends."""


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


class Waits(Callback):
    """Says that the fourth step has begun, and stays there: until a signal comes, or for good."""

    def __init__(self, pipe: int, for_good: bool) -> None:
        self.pipe, self.for_good = pipe, for_good

    def on_train_batch_start(self, trainer: Any, module: nn.Module, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3:
            os.write(self.pipe, b".")
            while self.for_good or not trainer.is_interrupted:
                time.sleep(0.01)


def train(folder: Path, *callbacks: Callback) -> TrainModule:
    seed_everything(1, verbose=False)
    module = Net()
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[ModelCheckpoint(folder), *callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(16, 2)), 2, shuffle=True), ckpt_path="last")
    return module


def fork(folder: Path, for_good: bool) -> tuple[int, int]:
    """Train in a fork; return its process id, and the pipe on which it says that it waits."""
    reader, writer = os.pipe()
    program = os.getpid()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    code = 99
    try:
        kill_with_parent(signal.SIGKILL)  # else a fork whose step never ends would outlive the program
        if os.getppid() != program:
            os._exit(97)
        train(folder, Waits(writer, for_good))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 98
    except KeyboardInterrupt:
        code = 130  # as a shell says it
    finally:
        os._exit(code)


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    expected = train(folder / "undisturbed").state_dict()
    for name in names:
        numbers, for_good = CASES[name]
        pid, pipe = fork(folder / name, for_good)
        assert select.select([pipe], [], [], 30)[0], f"{name}: the fork did not come to its fourth step"
        for number in numbers:
            os.kill(pid, number)
            time.sleep(1.1 * ECHO if for_good else 0)  # two of one kind that come at once are one
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        saved = [found.path for found in checkpoint.list_checkpoints(folder / name)]
        for path in saved:
            checkpoint.verify(path)
        weights = train(folder / name).state_dict()
        same = all(torch.equal(weights[key], value) for key, value in expected.items())
        print(json.dumps([name, code, [path.name for path in saved], same]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(CASES))
