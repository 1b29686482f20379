"""Standard output that cannot be written: whatever prints in a run falls silent once, and the run goes on."""

import re
from pathlib import Path

from programs import run_program

PROGRAM = """
import os, pty, sys
import torch
from echelon import Callback, Engine, Trainer, TrainModule
from echelon.callbacks import RichProgressBar, Timer, TQDMProgressBar
from torch.utils.data import DataLoader

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean()
        self.log("loss", loss, prog_bar=True)
        self.print("a line")
        self.print("a part", end="")
        self.trainer.print("another")
        return loss
    def validation_step(self, batch, batch_idx):
        self.log("val", 1.0, prog_bar=True)
    test_step = validation_step
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Breaks(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if self.master is not None:
            os.close(self.master)
            self.master = None

def pipe():
    ends = os.pipe()
    os.close(ends[0])
    return None, ends[1]

def full():
    return None, os.open("/dev/full", os.O_WRONLY)

own = os.dup(1)
for stream, bar in ((pipe, TQDMProgressBar), (full, TQDMProgressBar), (full, RichProgressBar),
                    (pty.openpty, TQDMProgressBar), (pty.openpty, RichProgressBar)):
    breaks = Breaks()
    breaks.master, broken = stream()
    os.dup2(broken, 1)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    loader = DataLoader(torch.ones(6, 1), batch_size=1)
    trainer = Trainer(max_epochs=2, callbacks=[bar(), breaks, Timer("00:01:00:00")], accelerator="cpu", logger=False,
                      enable_checkpointing=False, profiler="simple")
    trainer.fit(Net(), loader, loader)
    trainer.validate(dataloaders=loader)
    trainer.test(dataloaders=loader)
    Engine(accelerator="cpu").print("a line")
    os.write(own, f"{stream.__name__} {bar.__name__} {trainer.global_step}\\n".encode())
os.dup2(full()[1], 1)
sys.stdout = os.fdopen(1, "w", closefd=False)
Net().print("last")
"""


def test_a_run_goes_on_though_its_output_breaks(tmp_path: Path) -> None:
    done = run_program("-c", PROGRAM, folder=tmp_path, timeout=240)
    cases = ["pipe TQDM", "full TQDM", "full Rich", "openpty TQDM", "openpty Rich"]
    assert done.stdout == "".join(f"{case}ProgressBar 12\n" for case in cases), done.stderr
    assert done.returncode == 0, done.stderr
    said = re.findall(r"cannot be written \((.*)\): nothing more is printed, and the run goes on", done.stderr)
    counts = [sum(word in text for text in said) for word in ("Broken pipe", "No space left", "Input/output")]
    assert counts[:2] == [1, 3], done.stderr
    assert counts[2] in (1, 2), done.stderr  # tqdm itself falls silent where a terminal is gone
    assert "Traceback" not in done.stderr
