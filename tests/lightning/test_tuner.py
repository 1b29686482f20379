"""Tuner: Lightning's searches before a fit, which leave trainer and module as they were."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from beside import trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon
import echelon.lightning as L

Tuner = L.pytorch.tuner.Tuner


class Net(L.LightningModule):
    """Builds its loaders with `batch_size`, and its optimizer with `lr`."""

    limit = 10**9

    def __init__(self, lr: float = 0.01, batch_size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters("lr")
        self.batch_size = batch_size
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        self.register_buffer("mean", torch.zeros(()))
        self.sizes: list[int] = []

    def loss(self, batch: Any) -> Any:
        self.sizes.append(len(batch[0]))
        if len(batch[0]) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TB")
        self.mean += batch[0].mean() if self.training else 0
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)

    def train_dataloader(self) -> Any:
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), self.batch_size)

    val_dataloader = predict_dataloader = train_dataloader


class Seen(L.Callback):
    """Notes what is called."""

    def __init__(self) -> None:
        self.hooks: list[str] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.hooks.append(f"setup {stage}")

    def on_train_batch_end(self, *args: Any) -> None:
        self.hooks.append("batch")


def state(own: Any) -> Any:
    names = ("callbacks", "loggers", "checkpoint_callback", "current_epoch", "global_step", "max_steps", "max_epochs")
    return {name: getattr(own, name) for name in (*names, "limit_val_batches", "should_stop", "enable_checkpointing")}


def test_a_rate_is_found_and_everything_is_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model, seen = Net(), Seen()
    before = copy.deepcopy(model.state_dict())
    own = trainer(L, logger=True, enable_checkpointing=True, callbacks=[seen], max_epochs=3)
    as_it_was = state(own)
    finder = Tuner(own).lr_find(model, min_lr=1e-6, max_lr=1.0, num_training=40)
    assert len(finder.results["lr"]) == len(finder.results["loss"]) <= 40 and finder.results["lr"][0] == 1e-6
    assert model.hparams.lr == finder.suggestion() != 0.01
    assert finder.plot(suggest=True).axes[0].get_xscale() == "log"
    assert state(own) == as_it_was and model.trainer is own
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert seen.hooks == ["setup fit"] and not list(tmp_path.iterdir())

    kept = Tuner(own).lr_find(model, num_training=20, update_attr=False, mode="linear", early_stop_threshold=None)
    assert model.hparams.lr == finder.suggestion() and len(kept.results["lr"]) == 20
    torch.manual_seed(1)
    own.fit(model)
    fitted = Net(lr=finder.suggestion())
    fitted.load_state_dict(before)
    torch.manual_seed(1)
    trainer(L, max_epochs=3).fit(fitted)
    assert own.global_step == 96 and (tmp_path / "lightning_logs" / "version_0").is_dir()
    assert len(list((tmp_path / "lightning_logs").iterdir())) == 1
    assert all(torch.equal(value, fitted.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("arguments", "size"),
    [
        ({"init_val": 4, "max_trials": 2}, 8),
        ({"init_val": 4, "max_trials": 2, "mode": "binsearch"}, 7),
        ({}, 64),  # no larger than the data set
        ({"max_val": 16}, 16),
        ({"max_trials": 0}, 2),
        ({"limit": 20}, 16),
        ({"limit": 20, "init_val": 64}, 16),
        ({"limit": 20, "mode": "binsearch", "margin": 0.0}, 20),
    ],
)
def test_a_batch_size_is_found_in_a_fit(arguments: dict[str, Any], size: int) -> None:
    model, arguments = Net(), dict(arguments)
    model.limit = arguments.pop("limit", model.limit)
    before = copy.deepcopy(model.state_dict())
    own = trainer(L, max_epochs=1)
    assert Tuner(own).scale_batch_size(model, steps_per_trial=2, **arguments) == size == model.batch_size
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (own.global_step, own.current_epoch, own.max_epochs) == (0, 0, 1)
    own.fit(model)
    assert own.global_step == -(-64 // size) and own.train_dataloader.batch_size == size


@pytest.mark.parametrize("method", ["validate", "predict"])
def test_a_batch_size_is_found_in_an_evaluation(method: Any) -> None:
    model, seen = Net(), Seen()
    own = trainer(L, callbacks=[seen])
    assert Tuner(own).scale_batch_size(model, method=method, max_trials=4, steps_per_trial=2) == 16 == model.batch_size
    assert model.sizes == [2, 2, 4, 4, 8, 8, 16, 16] and seen.hooks == [] and own.callbacks[0] is seen


def test_the_datamodule_gets_what_was_found_also_from_other_processes() -> None:
    class Data(L.LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2

        def train_dataloader(self) -> Any:
            return DataLoader(TensorDataset(torch.ones(64, 4), torch.ones(64, 1)), self.batch_size)

    data, model = Data(), Net()
    own = trainer(L)
    assert Tuner(own).scale_batch_size(model, datamodule=data, max_trials=3) == 8 == data.batch_size
    assert own.datamodule is data
    processes = trainer(L, devices=2, strategy="ddp_fork")
    finder = Tuner(processes).lr_find(model, num_training=15, datamodule=data, early_stop_threshold=None)
    assert len(finder.results["loss"]) == 15 and model.hparams.lr == finder.suggestion() and processes.global_step == 0
    with pytest.raises(echelon.ConfigError, match="not supported with distributed strategies, got 2 processes"):
        Tuner(processes).scale_batch_size(model)


def test_random_numbers_stay_and_steps_without_a_loss_are_left_out() -> None:
    class Sometimes(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            torch.rand(3)
            return None if batch_idx in (5, 13) else self.loss(batch)

    own, model = trainer(L), Sometimes()
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    finders = [Tuner(own).lr_find(model, num_training=20, update_attr=False) for _ in range(2)]
    assert torch.equal(torch.rand(2), expected)
    losses = [torch.tensor(finder.results["loss"]) for finder in finders]
    assert losses[0].isnan().nonzero().flatten().tolist() == [5, 13]
    assert torch.equal(losses[0].nan_to_num(), losses[1].nan_to_num()) and finders[0].suggestion() is not None


def test_what_cannot_be_searched_says_so() -> None:
    own, model = trainer(L), Net()
    loader = model.train_dataloader()
    tuner = Tuner(own)
    for call, text in (
        (lambda: tuner.lr_find(model, method="test"), "lr_find needs method='fit', got 'test'"),
        (lambda: tuner.lr_find(model, method="tune"), "method 'tune' is invalid. Choose one of fit, "),
        (
            lambda: tuner.lr_find(model, dataloaders=loader),
            "`dataloaders` must be None, got loaders; please consider setting `train_data",
        ),
        (
            lambda: tuner.scale_batch_size(model, loader),
            r"cannot be used with dataloaders passed directly.*got DataLoader",
        ),
        (lambda: tuner.scale_batch_size(model, loader, method="test"), "`train_dataloaders` and .* must be None"),
        (lambda: tuner.scale_batch_size(model, mode="x"), "mode should be either of power, binsearch, got 'x'"),
        (lambda: tuner.scale_batch_size(model, batch_arg_name="bs"), "'bs'.* found none"),
        (lambda: tuner.lr_find(model, attr_name="rate"), "sets rate in Net"),
    ):
        with pytest.raises(echelon.EchelonError, match=text):
            call()
    second = trainer(L, callbacks=[echelon.LearningRateFinder(), echelon.BatchSizeFinder()])
    for search in (Tuner(second).lr_find, Tuner(second).scale_batch_size):
        with pytest.raises(echelon.ConfigError, match="already configured with a `.*Finder`, and Tuner brings its own"):
            search(model)
    quick = Tuner(trainer(L, fast_dev_run=True))
    assert quick.lr_find(model) is None and quick.scale_batch_size(model) is None
