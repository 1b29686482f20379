"""On a system without fork, fcntl, resource and POSIX's signals, one process trains; more are refused in words."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

REFUSED = """
import torch, echelon, echelon.trainer.cli.main as cli
from torch import nn

class Line(echelon.TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
    def training_step(self, batch):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

assert cli.main(["ckpt", "ls", "."]) == 0
trainer = echelon.Trainer(strategy="ddp", devices=2, accelerator="cpu", max_epochs=1, logger=False)
try:
    trainer.fit(Line(), torch.utils.data.DataLoader(torch.ones(4, 1)))
except echelon.ConfigError as error:
    print(error)
"""


def test_one_process_trains_and_resumes_to_the_bit_and_several_are_refused_with_what_to_do(tmp_path):
    (tmp_path / "several.py").write_text(REFUSED)
    words = [sys.executable, "-W", "error", HERE / "without_posix.py", HERE / "one_process.py", "several.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumes to the bit and is read again" in done.stdout
    assert "use strategy='single' on one device, or run it under WSL 2" in done.stdout
