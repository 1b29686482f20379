"""What the GPU tests share: a small network, its data, and a quiet trainer.

GPU_TESTS_ON=cpu runs them on the CPU, which shows that the tests themselves run; `make test-gpu` runs them on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon import Trainer, TrainModule

ON_CPU = os.environ.get("GPU_TESTS_ON") == "cpu"
DEVICE = "cpu" if ON_CPU else "cuda"
WIDTH = 64


class Net(TrainModule):
    """Some blocks with dropout; what it logs, returns and draws is chosen by the test."""

    def __init__(
        self, *, dropout: float = 0.0, counts: bool = False, logs: bool = False, draws: bool = False, outputs: int = 8
    ) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout)) for _ in range(3))
        )
        self.head = nn.Linear(WIDTH, outputs)
        self.counts, self.logs, self.draws = counts, logs, draws

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(x))
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self(batch[0]).square().mean()
        if self.logs:
            self.log("loss", loss, on_step=True, on_epoch=True)
        return echelon.Loss(loss * 7, 7) if self.counts else loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if self.draws:
            torch.rand(3, device=batch[0].device)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def loader(num_samples: int = 2048, batch_size: int = 16, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(num_samples, WIDTH, generator=generator)), batch_size, **options)


def quiet_on_gpu(**settings: Any) -> Trainer:
    silent: dict[str, Any] = {
        "accelerator": "cpu" if ON_CPU else "gpu",
        "devices": 1,
        "strategy": "single",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_steps": 20,
    }
    return Trainer(**{**silent, **settings})


def weights_of(module: nn.Module) -> Tensor:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
    return torch.cat([p.detach().flatten().float().cpu() for p in whole])


def fitted(seed: int = 3, data: Any = None, validation: Any = None, **settings: Any) -> Net:
    """Return a network that was trained with a seed; settings that are the network's go to it."""
    own = {name: settings.pop(name) for name in ("dropout", "counts", "logs", "draws") if name in settings}
    echelon.seed_everything(seed, verbose=False)
    module = Net(**own)
    quiet_on_gpu(**settings).fit(module, data or loader(), validation)
    return module


def run_program(text: str, *launcher: str, timeout: float = 300) -> str:
    """Run a program that has these helpers, and return what it prints."""
    header = f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nimport on_gpu\nimport echelon\n"
    command = [sys.executable, *launcher, "-c", header + text] if not launcher else [sys.executable, *launcher]
    if launcher:
        program = Path(launcher[-1])
        program.write_text(header + text)
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout
