"""Callbacks on several ranks: all decide the same, rank 0 writes, and the caller's know afterwards what happened."""

from __future__ import annotations

import csv
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import CSVLogger, Trainer, TrainModule
from echelon.callbacks import (
    BasePredictionWriter,
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    LossSpikePolicy,
    ModelCheckpoint,
    NaNGuard,
    ThroughputMonitor,
    Timer,
)
from echelon.common.errors import NonFiniteError


class Net(TrainModule):
    """A regression whose ranks have their own buffers, and which logs some numbers where only one rank has them."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        if self.global_rank == 1:
            self.log("of_rank_1", float(self.global_step), on_step=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch[1]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Plain(Net):
    """Without buffers, whose training therefore does not depend on the number of ranks; in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1).double()
        for parameter in self.net.parameters():
            nn.init.ones_(parameter)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([part.double() for part in batch], batch_idx)


class Comparing(Callback):
    """Keeps the states of every rank's callbacks, and the module's state."""

    def __init__(self) -> None:
        self.of_ranks: list[Any] = []

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        states = {type(one).__name__: one.state_dict() for one in trainer.callbacks if one is not self}
        for name in ("Timer", "ThroughputMonitor"):  # clocks
            states.pop(name, None)
        weights = {name: value.tolist() for name, value in module.state_dict().items()}
        self.of_ranks = trainer.strategy.all_gather_object(repr((states, weights, trainer.log_dir)))

    def state_dict(self) -> dict[str, Any]:
        return {"of_ranks": self.of_ranks}

    def load_state_dict(self, state_dict: Any) -> None:
        self.of_ranks = state_dict["of_ranks"]


def data(num_samples: int, batch_size: int, outlier: int | None = None, value: float = 100.0) -> DataLoader[Any]:
    x = torch.linspace(-1, 1, 2 * num_samples).reshape(num_samples, 2).sin()
    y = x.sum(dim=1, keepdim=True)
    if outlier is not None:
        y[outlier] = value
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def trainer_of_ranks(folder: Path, *callbacks: Callback, **settings: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        "accelerator": "cpu",
        "devices": 2,
        "strategy": "ddp",
        "max_epochs": 2,
    }
    return Trainer(default_root_dir=folder, callbacks=list(callbacks), **{**quiet, **settings})


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """Fit 2 epochs of 6 steps on 2 ranks: 45 samples, 5 of them in the last step; no batch of 3 for validation."""
    trainer = trainer_of_ranks(
        tmp_path_factory.mktemp("ranks"),
        Comparing(),
        Timer(),
        EarlyStopping("val", patience=9),
        LearningRateMonitor("step"),
        DeviceStatsMonitor(),
        ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), length_fn=lambda batch: 3 * len(batch[0])),
        LossSpikePolicy(warmup=2, threshold=20),
        NaNGuard(),
        EMAWeightAveraging(decay=0.5),
        ModelCheckpoint(filename="{step}-{of_rank_1:.0f}", monitor="loss_step", every_n_train_steps=2, save_top_k=3),
        ModelCheckpoint(filename="{epoch}-{val:.3f}", monitor="val", save_top_k=2),
        ModelCheckpoint(filename="late-{step}", monitor="val", every_n_train_steps=4, save_top_k=-1),
        logger=CSVLogger(tmp_path_factory.mktemp("logs")),
        log_every_n_steps=2,
    )
    trainer.fit(Net(), data(45, 4, outlier=30), data(3, 3))
    return trainer


def of_kind(trainer: Trainer, kind: type) -> Any:
    return next(one for one in trainer.callbacks if isinstance(one, kind))


def test_all_ranks_end_with_the_same_state_weights_and_folder(fitted: Trainer) -> None:
    first, second = of_kind(fitted, Comparing).of_ranks
    assert first == second
    assert fitted.log_dir in first


def test_what_only_one_rank_knows_decides_on_all(fitted: Trainer) -> None:
    decisions = of_kind(fitted, LossSpikePolicy).decisions
    assert [decision["global_step"] for decision in decisions] == [3, 9]
    by_loss, by_val, later = fitted.checkpoint_callbacks
    names = {Path(path).name for path in by_loss.best_k_models}
    assert len(names) == 3
    assert names <= {f"step={step}-of_rank_1={step - 1}.ckpt" for step in range(2, 13, 2)}
    # due at 4, 8 and 12, decided where the metric is computed
    assert [Path(path).name for path in later.best_k_models] == ["late-step=6.ckpt", "late-step=12.ckpt"]
    assert by_val.best_model_score == min(by_val.best_k_models.values())
    assert all(Path(path).is_dir() for path in [*by_loss.best_k_models, *by_val.best_k_models])


def test_the_callers_callbacks_know_how_the_run_went(fitted: Trainer) -> None:
    assert len(of_kind(fitted, LearningRateMonitor).lrs["lr-SGD"]) == 6
    timer = of_kind(fitted, Timer)
    assert timer.time_elapsed() > timer.time_elapsed("validate") > 0
    assert of_kind(fitted, EarlyStopping).best_score == fitted.checkpoint_callbacks[1].best_model_score
    assert fitted.callback_metrics["of_rank_1"] == 11.0


def test_rank_zero_logs_what_all_have_done(fitted: Trainer) -> None:
    with (Path(fitted.log_dir) / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["throughput/samples"]]
    assert [float(row["throughput/samples"]) for row in rows] == [16, 32, 45, 61, 77, 90]
    assert [float(row["throughput/tokens"]) for row in rows] == [48, 96, 135, 183, 231, 270]
    assert list(Path(fitted.log_dir).parent.iterdir()) == [Path(fitted.log_dir)]


def test_callbacks_and_loggers_can_be_used_again(fitted: Trainer) -> None:
    before = len(of_kind(fitted, LearningRateMonitor).lrs["lr-SGD"])
    fitted.fit(Net(), data(45, 4), data(3, 3))
    assert fitted.global_step == 12
    assert len(of_kind(fitted, LearningRateMonitor).lrs["lr-SGD"]) == before


def test_a_loss_that_is_not_finite_on_one_rank_names_the_rank_on_all(tmp_path: Path) -> None:
    trainer = trainer_of_ranks(tmp_path, NaNGuard())
    with pytest.raises(NonFiniteError, match=r"Rank 1: The loss is inf at global_step 1 \(epoch 0, batch_idx 1\)"):
        trainer.fit(Net(), data(16, 4, outlier=13, value=float("inf")))


def test_a_rank_without_samples_takes_part_in_what_the_others_decide(tmp_path: Path) -> None:
    spikes, saved = [], []
    for devices in (1, 2):  # steps of 8, 8 and 1 samples
        callbacks: list[Any] = [
            LossSpikePolicy(),
            NaNGuard(),
            ThroughputMonitor(length_fn=len),
            ModelCheckpoint(tmp_path / str(devices), "{step}-{loss_step:.5f}", "loss_step", every_n_train_steps=1),
        ]
        trainer = trainer_of_ranks(
            tmp_path, *callbacks, devices=devices, strategy="auto", max_epochs=1, log_every_n_steps=1
        )
        trainer.fit(Plain(), data(17, 8 // devices))
        spikes.append(callbacks[0].state_dict()["statistics"])
        saved.append(Path(callbacks[-1].best_model_path).name)
    assert saved[0] == saved[1]
    for name in ("loss", "grad_norm"):
        assert spikes[0][name] == pytest.approx(spikes[1][name], abs=1e-12)


def test_time_that_is_up_on_rank_zero_is_up_on_all(tmp_path: Path) -> None:
    trainer = trainer_of_ranks(tmp_path, Timer(timedelta(0), verbose=False))
    trainer.fit(Net(), data(45, 4))
    assert trainer.global_step == 0


class Writer(BasePredictionWriter):
    def __init__(self, folder: Path) -> None:
        super().__init__("batch_and_epoch")
        self.folder = folder

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, batch_indices: Any, batch: Any, batch_idx: int, *rest: Any
    ) -> None:
        (self.folder / f"batch_{batch_idx}_of_rank_{trainer.strategy.rank}").touch()

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        torch.save(torch.cat(predictions), self.folder / f"all_of_rank_{trainer.strategy.rank}.pt")


def test_predictions_are_written_by_each_rank_or_all_by_rank_zero(tmp_path: Path) -> None:
    loader = data(10, 4)
    trainer_of_ranks(tmp_path, Writer(tmp_path)).predict(Net(), loader)
    names = {path.name for path in tmp_path.iterdir()}
    assert {name for name in names if name.startswith("all")} == {"all_of_rank_0.pt"}
    assert {name.split("_of")[0] for name in names if name.startswith("batch")} == {"batch_0", "batch_1", "batch_2"}
    dataset: Any = loader.dataset
    assert torch.equal(torch.load(tmp_path / "all_of_rank_0.pt"), dataset.tensors[1])


def test_the_state_of_a_callback_whose_class_is_inside_a_function_comes_back(tmp_path: Path) -> None:
    class Counting(Callback):
        steps = 0

        def on_train_step_end(self, trainer: Any, module: Any) -> None:
            self.steps += 1

        def state_dict(self) -> dict[str, Any]:
            return {"steps": self.steps}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.steps = state_dict["steps"]

    counting = Counting()
    trainer_of_ranks(tmp_path, counting).fit(
        Net(), DataLoader(TensorDataset(torch.randn(24, 2), torch.randn(24, 1)), 4)
    )
    assert counting.steps == 6


def test_what_asked_to_stop_before_min_steps_ends_training_there(tmp_path: Path) -> None:
    stopping = EarlyStopping("val", patience=0, min_delta=1e9)  # nothing is that much better: asks at the second check
    settings: Any = {"min_steps": 7, "max_epochs": 1, "val_check_interval": 2, "num_sanity_val_steps": 0}
    trainer = trainer_of_ranks(tmp_path, stopping, **settings)
    trainer.fit(Net(), data(48, 2), data(8, 4))
    assert trainer.global_step == 7
