"""An epoch's logged metrics are reported whole by the run that resumes, even if none of its batches are left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import trainer_in
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MetricCollection, SumMetric

from echelon import ModelCheckpoint, ParallelStrategy, TrainModule


class Unknown:
    """Four batches, whose number is not known; two for each of two ranks. It knows where it is."""

    def __init__(self) -> None:
        self.position = self.start = 0

    def __iter__(self) -> Iterator[Tensor]:
        size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        rank = torch.distributed.get_rank() if size > 1 else 0
        start, self.start = self.start, 0
        for self.position, value in list(enumerate(range(rank, 4, size), 1))[start:]:
            yield torch.full((1, 1), float(value))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.start = state_dict["position"]


class Logging(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net: Any = nn.Linear(1, 1)
        self.total, self.collected = SumMetric(), MetricCollection({"largest": MaxMetric()})

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        mean = batch.mean()
        self.total.update(mean)
        self.collected.update(mean)
        self.log("total", self.total, on_step=False, on_epoch=True)
        self.log_dict(self.collected, on_step=False, on_epoch=True)
        self.log("mean", mean, on_step=False, on_epoch=True, sync_dist=True)
        self.log("both", mean, on_step=True, on_epoch=True, sync_dist=True)
        self.log("most", mean.double(), on_step=False, on_epoch=True, reduce_fx=torch.max, sync_dist=True)
        return self.net(batch).square().mean()

    def on_train_epoch_start(self) -> None:
        self.log("begun", 7.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder: Path, num_steps: int, num_ranks: int, ckpt_path: Path | None = None) -> dict[str, float]:
    saver = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, monitor="step", filename="{step}")
    settings = {"strategy": "ddp", "devices": 2} if num_ranks == 2 else {}
    trainer = trainer_in(folder, saver, max_epochs=1, max_steps=num_steps, **settings)
    trainer.fit(Logging(), Unknown(), ckpt_path=ckpt_path)
    # a step's value is rank 0's until it is reduced
    return {name: value.item() for name, value in trainer.callback_metrics.items() if name != "both_step"}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_epoch_of_unknown_length_that_is_resumed_at_its_last_step(tmp_path: Path, num_ranks: int) -> None:
    last = 4 // num_ranks
    whole = fit(tmp_path / "whole", -1, num_ranks)
    assert (whole["mean"], whole["total"], whole["largest"]) == (1.5, 6, 3)
    for step in range(1, last + 1):
        resumed = fit(tmp_path / f"{step}", -1, num_ranks, tmp_path / "whole" / f"step={step}.ckpt")
        assert resumed == whole, step


class InHooks(TrainModule):
    """Logs in hooks, which all stages of a pipeline call, and in a step, of which the last stage has the value."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for block in self.blocks:
            x = block(x)
        self.log("mean", batch.mean(), on_step=False, on_epoch=True)
        return x.square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.log("most", batch.max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("sum", batch.sum(), on_step=False, on_epoch=True, reduce_fx="sum")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_what_all_stages_log_is_whole_in_a_resumed_epoch(tmp_path: Path, step: int) -> None:
    def run(name: str, ckpt_path: Path | None = None) -> Any:
        saver = ModelCheckpoint(tmp_path / name, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        strategy = ParallelStrategy(pp=2)
        trainer = trainer_in(tmp_path / name, saver, max_epochs=1, strategy=strategy, devices=2, global_batch_size=2)
        trainer.fit(InHooks(), DataLoader(torch.arange(8.0).flip(0)[:, None], 1), ckpt_path=ckpt_path)
        return {name: value.item() for name, value in trainer.callback_metrics.items()}

    whole = run("whole")
    assert (whole["most"], whole["sum"], whole["mean"]) == (7, 28, 3.5)
    assert run("resumed", tmp_path / "whole" / f"step={step}.ckpt") == whole
