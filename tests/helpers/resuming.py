"""Runs that are interrupted and resumed, and their bitwise comparison with an uninterrupted run."""

from __future__ import annotations

import csv
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from sweep import IS_SWEEP
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from echelon import Callback, CSVLogger, ModelCheckpoint, Trainer, TrainModule, seed_everything

NUM_SAMPLES = 14


class Interrupted(Exception):  # noqa: N818 - it is not an error
    """Ends a run after a step, instead of a kill."""


@dataclass
class Run:
    """What is trained, and on which data; built again for every part of a run."""

    module: Any
    train: Any
    val: Any = None
    settings: dict[str, Any] = field(default_factory=dict)
    callbacks: list[Callback] = field(default_factory=list)


@dataclass
class Record:
    """What a run did, by optimizer step, and the state in which it ended."""

    losses: list[tuple[int, float]] = field(default_factory=list)
    samples: list[tuple[int, Any]] = field(default_factory=list)
    final: dict[str, Any] = field(default_factory=dict)
    curve: list[dict[str, str]] = field(default_factory=list)
    num_steps: int = 0
    epochs: list[int] = field(default_factory=list)


class Killed(Callback):
    """Kills its process after the first step of the second epoch, once the checkpoint of the first is written."""

    def __init__(self, folder: Any) -> None:
        self.folder = folder

    def on_train_step_end(self, trainer: Any, module: nn.Module) -> None:
        if trainer.current_epoch == 1:
            while not Path(self.folder, "last.ckpt").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


class Recorder(Callback):
    """Records losses and samples, and interrupts the run once `stop_after` steps are complete and saved."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.record, self.stop_after = Record(), stop_after

    def _interrupt(self, trainer: Any) -> None:
        if trainer.global_step == self.stop_after:
            raise Interrupted

    def on_train_epoch_start(self, trainer: Any, module: nn.Module) -> None:
        self._interrupt(trainer)
        self.record.epochs.append(trainer.global_step)

    def on_train_batch_start(self, trainer: Any, module: nn.Module, batch: Any, batch_idx: int) -> None:
        self._interrupt(trainer)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs is not None:
            self.record.losses.append((batch_idx, outputs["loss"].item() if isinstance(outputs, dict) else outputs))
        self.record.samples.append((batch_idx, module.ids(batch)))


def fit(
    run: Run,
    folder: Path,
    ckpt_path: str | None = None,
    stop_after: int | None = None,
    every_n_steps: int = 1,
    ends_with: type[BaseException] = Interrupted,
    optimizer_settings: Literal["saved", "configured"] = "saved",
) -> Record:
    """Train a part of a run, with checkpoints every `every_n_steps` steps, and its curve in `folder`."""
    recorder = Recorder(stop_after)
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "log_every_n_steps": 1,
        "max_epochs": 2,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **run.settings,
    }
    saver = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=every_n_steps, save_last=True)
    trainer = Trainer(
        default_root_dir=folder,
        logger=CSVLogger(folder, "csv", version=0),
        callbacks=[recorder, *run.callbacks, saver],
        **settings,
    )
    with suppress(ends_with):
        trainer.fit(run.module, run.train, run.val, ckpt_path=ckpt_path, optimizer_settings=optimizer_settings)
    if isinstance(run.train, DataLoader):
        run.train._iterator = None  # workers that the garbage collector ends take 5 seconds each
    record = recorder.record
    record.num_steps = trainer.global_step
    record.final = _final(trainer, run.module)
    record.curve = curve(folder)
    return record


def _final(trainer: Trainer, module: nn.Module) -> dict[str, Any]:
    optimizers = module.optimizers(use_pl_optimizer=False) if isinstance(module, TrainModule) else []
    return {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "optimizers": [one.state_dict() for one in (optimizers if isinstance(optimizers, list) else [optimizers])],
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "callbacks": [_relative(callback.state_dict()) for callback in trainer.callbacks],
        "counters": {k: v for k, v in trainer.counters.state_dict().items() if k != "seconds"},
        "rng": torch.get_rng_state(),
    }


def _relative(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != "dirpath"}


def curve(folder: Path) -> list[dict[str, str]]:
    """Return the rows of the logged table as text, with all digits, without empty columns."""
    with (folder / "csv" / "version_0" / "metrics.csv").open() as file:
        return [{name: text for name, text in row.items() if text} for row in csv.DictReader(file)]


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Compare nested structures bitwise; NaN equals NaN."""
    if isinstance(expected, Tensor):
        assert torch.equal(found.nan_to_num(nan=1e30), expected.nan_to_num(nan=1e30)), f"{where} differs"
    elif isinstance(expected, dict):
        assert list(found) == list(expected) or sorted(map(str, found)) == sorted(map(str, expected)), where
        for name, value in expected.items():
            assert_same(found[name], value, f"{where}[{name!r}]")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), f"{where}: {found} is not {expected}"
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}[{index}]")
    else:
        assert found == expected or (found != found and expected != expected), f"{where}: {found} is not {expected}"


def assert_exact(build: Callable[[], Run], tmp_path: Path, steps: Sequence[int] | None = None) -> Record:
    """Interrupt a run after these steps, resume it each time, and compare with the run that was not interrupted.

    By default one run is interrupted after every step, another only inside its first epoch, and a third only at that
    epoch's end. In a sweep each step interrupts a run of its own, which goes on to the end.
    """
    seed_everything(1)
    whole = fit(build(), tmp_path / "whole")
    assert whole.num_steps > 3
    every = range(1, whole.num_steps)
    if IS_SWEEP:
        chains = [[step] for step in (every if steps is None else steps)]
    else:
        end = (*whole.epochs, whole.num_steps)[1]
        chains = [every, [end // 2], whole.epochs[1:2]] if steps is None else [steps]
    for stops in filter(len, chains):
        when = "interrupted after " + ", ".join(map(str, stops))
        compare(whole, interrupted(build, tmp_path / when.replace(" ", "_"), stops), when)
    return whole


def interrupted(build: Callable[[], Run], folder: Path, stops: Sequence[int]) -> list[Record]:
    """Return the parts of a run that is interrupted after each of these steps, and resumed from there."""
    parts: list[Record] = []
    for stop in (*stops, None):
        seed_everything(99 + len(parts) if parts else 1)
        parts.append(fit(build(), folder, ckpt_path="last" if parts else None, stop_after=stop))
        assert stop in (None, parts[-1].num_steps)
    return parts


def compare(whole: Record, parts: list[Record], when: str) -> None:
    """Compare the parts of a run with the whole run."""
    assert_same([loss for part in parts for loss in part.losses], whole.losses, f"{when}: losses")
    assert_same([entry for part in parts for entry in part.samples], whole.samples, f"{when}: samples")
    assert_same(parts[-1].final, whole.final, when)
    assert_same(parts[-1].curve, whole.curve, f"{when}: curve")


class Numbered(Dataset[Any]):
    """Samples with their numbers; `augment` changes each one randomly when it is read."""

    def __init__(self, num_samples: int = NUM_SAMPLES, augment: Callable[[Tensor], Tensor] | None = None) -> None:
        self.num_samples, self.augment = num_samples, augment
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads.append(index)
        x = torch.tensor([index / 10, 1.0 - index / 7])
        return (x if self.augment is None else self.augment(x)), torch.tensor(index)


class Small(TrainModule):
    """A network with dropout and running statistics, AdamW, and curves of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 1))

    def loss(self, batch: Any) -> Tensor:
        x, number = batch
        return nn.functional.mse_loss(self.net(x)[:, 0], number / 10)

    def ids(self, batch: Any) -> Any:
        return batch[1].tolist()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.rand(())  # random numbers drawn in validation must not affect training
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def numbered(num_samples: int = NUM_SAMPLES, augment: Any = None, **options: Any) -> DataLoader[Any]:
    """Return a shuffled loader of numbered samples, three per batch."""
    options = {"batch_size": 3, "shuffle": True, **options}
    return DataLoader(Numbered(num_samples, augment), **options)
