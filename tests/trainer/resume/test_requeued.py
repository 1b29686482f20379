"""A job that its scheduler starts again while the one before still ends, or after it was killed."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from programs import WatchedProgram

from echelon.common.proc_status import look_at

PROGRAM = """
import os, sys, time
from pathlib import Path
import torch
from echelon import Callback, CSVLogger, ModelCheckpoint, Trainer, TrainModule
from torch.utils.data import DataLoader, TensorDataset

folder, place, blocks_at, name = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
settings = dict(word.split("=") for word in sys.argv[5:])

class Line(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1, bias=False).double()
        torch.nn.init.zeros_(self.layer.weight)
    def training_step(self, batch, batch_idx):
        if self.global_step == blocks_at:  # a long step
            # as one write: unbuffered, print makes another for the end of the line, and ranks come between
            print(f"rank {self.global_rank} blocks, {os.getpid()}\\n", end="", flush=True)
            while not (folder / "second").exists():
                time.sleep(0.01)
            time.sleep(0.5)  # in which the second job chooses its checkpoint and comes to the lock
        return (self.layer(batch[0]) - 1).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Tells(Callback):
    def on_train_start(self, trainer, module):
        if trainer.is_global_zero:
            print("starts at", trainer.global_step, flush=True)

saving = ModelCheckpoint(folder / "saved" if place == "dirpath" else None, every_n_train_steps=1, save_last=True)
logger = CSVLogger(folder / "logs") if place == "logger" else False
trainer = Trainer(max_steps=6, default_root_dir=folder, callbacks=[saving, Tells()], logger=logger, accelerator="cpu",
                  enable_progress_bar=False, enable_model_summary=False, **settings)
(folder / name).touch()
data = TensorDataset(torch.arange(24.0).double().view(12, 2) / 24)
line = Line()
trainer.fit(line, DataLoader(data, batch_size=4 // int(settings.get("devices", 1))), ckpt_path="last")
if trainer.is_global_zero:
    print("ends at", trainer.global_step, "from", Path(trainer.ckpt_path or "-").name, *line.layer.weight[0].tolist())
"""
LAUNCH = ["-c", "import sys; from echelon.trainer.cli.main import main; sys.exit(main())", "launch", "--nproc", "2"]


def job(folder: Path, place: str, blocks_at: int, name: str, *settings: str, launch: bool = False) -> WatchedProgram:
    (folder / "job.py").write_text(PROGRAM)
    words = [folder / "job.py", folder, place, blocks_at, name, *settings]
    return WatchedProgram([*(LAUNCH if launch else []), *map(str, words)], folder=folder)


def read_until(program: WatchedProgram, *words: str) -> str:
    lines = [""]
    while not all(word in lines[-1] for word in words):
        lines.append(program.readline())
        assert lines[-1], (lines, program.communicate())
    return lines[-1]


def ends(program: WatchedProgram) -> tuple[str, list[float]]:
    """Return the checkpoint from which the job went on, and its weights."""
    line = read_until(program, "ends at 6").split()
    assert program.wait(60) == 0
    return line[4], [float(word) for word in line[5:]]


def weights_after_6_steps() -> list[float]:
    """Return what the program trains if nothing ends it."""
    layer = torch.nn.Linear(2, 1, bias=False).double()
    torch.nn.init.zeros_(layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for batch in 2 * (torch.arange(24.0).double().view(12, 2) / 24).split(4):
        optimizer.zero_grad()
        (layer(batch) - 1).square().mean().backward()
        optimizer.step()
    return layer.weight[0].tolist()


@pytest.mark.parametrize(
    ("place", "blocks_at", "settings"),
    [
        ("dirpath", 2, ["strategy=ddp", "devices=2"]),
        ("logger", 0, ["strategy=single"]),  # the first job has saved nothing when the second looks
    ],
)
def test_the_second_job_goes_on_from_what_the_first_saves_while_it_ends(place, blocks_at, settings, tmp_path):
    first = job(tmp_path, place, blocks_at, "first", *settings)
    try:
        read_until(first, "rank 0 blocks")
        first.send_signal(signal.SIGTERM)
        second = job(tmp_path, place, -1, "second", *settings)
        try:
            start = int(read_until(second, "starts at").split()[-1])
            resumed_from, weights = ends(second)
        finally:
            second.close()
        assert first.wait(60) == 143
        assert start > blocks_at  # several ranks agree on the last step in advance, and may do one more
        assert resumed_from.endswith(f"-step={start}.ckpt")
        assert weights == pytest.approx(weights_after_6_steps(), abs=1e-12)
        assert [path.resolve().name for path in tmp_path.glob("**/last.ckpt")] == ["epoch=1-step=6.ckpt"]
        assert len(list(tmp_path.glob("logs/**/version_*"))) == (place == "logger")
    finally:
        first.close()


@pytest.mark.only_in_sweep
def test_the_processes_of_a_launch_that_is_killed_end_with_it_and_leave_its_folder(tmp_path):
    first = job(tmp_path, "dirpath", 2, "first", "strategy=ddp", "devices=2", launch=True)
    pids: list[int] = []
    try:
        pids += [int(read_until(first, "blocks").split()[-1]) for _ in range(2)]
        while (tmp_path / "saved" / "last.ckpt").resolve().name != "epoch=0-step=2.ckpt":
            time.sleep(0.01)  # a thread saves it beside the next step
        os.kill(first.pid, signal.SIGKILL)
        first.wait(60)
        # no "second", for which the first would wait forever; the ranks of a launch would import torch once more
        second = job(tmp_path, "dirpath", -1, "third", "strategy=ddp", "devices=2")
        try:
            read_until(second, "starts at 2")
            ends(second)
        finally:
            second.close()
        assert [look_at(pid).state for pid in pids] == ["ended", "ended"]
    finally:
        first.close()
        for pid in pids:
            if look_at(pid).state != "ended":
                os.kill(pid, signal.SIGKILL)
