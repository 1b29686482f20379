"""Every layout writes one file with what its folder has; torch.load reads it, and every layout resumes from it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Callback, ParallelStrategy, Trainer, TrainModule, seed_everything
from echelon.strategies.fsdp import FSDPStrategy
from echelon.testing import run_ranks
from echelon.trainer.checkpoint import load, verify

LAYOUTS: dict[str, Any] = {
    "ddp": lambda: "ddp",
    "zero": lambda: "zero",
    "fsdp": FSDPStrategy,
    "tp": partial(ParallelStrategy, tp=2, tp_plan={"net.0": "colwise", "net.2": "rowwise"}),
    "pp": partial(ParallelStrategy, pp=2),
}
SAVED_AT, LAST = 2, 4


class Net(TrainModule):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))

    def configure_pipeline(self, num_stages: int) -> list[list[str]]:
        return [["net.0"], ["net.2"]]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.03)


class SaveTwice(Callback):
    """Saves a folder and a file after the same step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == SAVED_AT:
            trainer.save_checkpoint(self.folder / "folder.ckpt")
            trainer.save_checkpoint(self.folder / "file.ckpt", single_file=True)


def train(strategy: Any, folder: Path, ckpt_path: Path | None = None) -> dict[str, Tensor]:
    seed_everything(3, verbose=False)
    x = torch.randn(32, 3).double()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1 if strategy == "single" else "auto",
        precision="64-true",
        max_steps=LAST,
        global_batch_size=8,
        default_root_dir=folder,
        callbacks=[SaveTwice(folder)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(TensorDataset(x, x.sum(-1, keepdim=True)), 4, shuffle=True), ckpt_path=ckpt_path)
    return {name: weight.clone() for name, weight in trainer.strategy.full_model_state().items()}


def on_two_ranks(root: Path) -> dict[str, list[dict[str, Tensor]]]:
    """Train under each layout; resume from its file, and from that of fsdp; return the final weights."""
    ends = {name: [train(make(), root / name)] for name, make in LAYOUTS.items()}
    for name, make in LAYOUTS.items():
        for writer in (name, "fsdp"):
            ends[name].append(train(make(), root / "again", root / writer / "file.ckpt"))
    return ends


@pytest.mark.only_in_sweep
@pytest.mark.timeout(400)
def test_a_file_holds_what_the_folder_holds_and_resumes_anywhere(tmp_path: Path) -> None:
    ends = run_ranks(on_two_ranks, 2, tmp_path, timeout=300)[0]
    plain = train("single", tmp_path / "single")
    for name in (*LAYOUTS, "single"):
        folder, file = tmp_path / name / "folder.ckpt", tmp_path / name / "file.ckpt"
        assert file.is_file()
        verify(file)
        assert_equal(load(folder), load(file))
        read = torch.load(file, weights_only=True)
        assert_equal(read["state_dict"], load(folder)["model"])
        assert read["hyper_parameters"] == {"width": 6}
        optimizer = torch.optim.AdamW(Net().double().parameters())
        optimizer.load_state_dict(read["optimizer_states"][0])  # as Lightning does
        assert [path.name for path in sorted((tmp_path / name).iterdir())] == ["file.ckpt", "folder.ckpt"]
    for name, (undisturbed, own, fsdp) in ends.items():
        for end in (undisturbed, own, fsdp):
            for key, weight in end.items():
                torch.testing.assert_close(weight, plain[key], msg=lambda text, name=name: f"{name}: {text}")
        assert name == "tp" or all(torch.equal(undisturbed[key], own[key]) for key in own), name
    back = train("single", tmp_path / "again", tmp_path / "fsdp" / "file.ckpt")
    torch.testing.assert_close(back, plain)


def assert_equal(first: Any, second: Any) -> None:
    if isinstance(first, Tensor):
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for name in first:
            if name != "seconds":  # of the run, so far
                assert_equal(first[name], second[name])
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            assert_equal(one, other)
    else:
        assert first == second
