"""A tour of mistakes in the hooks of a module and in what it logs. Each is answered within 15 seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small import Regression, loader, quiet
from torch.optim import SGD
from tour import Mistake, Tour

from echelon import DataModule, ModelCheckpoint, ModuleError, RunError

tour = Tour()


def fit(module: Any, **settings: Any) -> None:
    quiet(**{"max_epochs": 1, **settings}).fit(module, loader(), loader())


# --- its hooks ---


@tour.answered_by(UserWarning, "on_train_epoch_ends", "Did you mean 'on_train_epoch_end'?")
def a_misspelt_hook() -> None:
    class Misspelt(Regression):
        def on_train_epoch_ends(self) -> None:
            pass

    fit(Misspelt())


@tour.answered_by(ModuleError, "Old.training_epoch_end must be on_train_epoch_end", "rename it")
def the_epoch_end_of_lightning_1() -> None:
    class Old(Regression):
        def training_epoch_end(self, outputs: Any) -> None:
            pass

    fit(Old())


@tour.answered_by(ModuleError, "got on_train_epoch_end(outputs)", "define on_train_epoch_end(self)")
def a_hook_with_an_argument_too_many() -> None:
    class Many(Regression):
        def on_train_epoch_end(self, outputs: Any) -> None:  # type: ignore[override]
            pass

    fit(Many())


@tour.answered_by(ModuleError, "got on_train_batch_end()", "define on_train_batch_end(self, outputs, batch, batch_idx)")
def a_hook_with_too_few_arguments() -> None:
    class Few(Regression):
        def on_train_batch_end(self) -> None:  # type: ignore[override]
            pass

    fit(Few())


@tour.answered_by(ModuleError, "transfer_batch_to_device", "None", "return")
def a_transfer_that_returns_nothing() -> None:
    class Unreturned(Regression):
        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> None:
            pass

    fit(Unreturned())


@tour.answered_by(ModuleError, "train_dataloader", "None", "return")
def a_loader_that_is_not_returned() -> None:
    class Unreturned(Regression):
        def train_dataloader(self) -> Any:
            loader()

    quiet(max_epochs=1).fit(Unreturned())


@tour.answered_by(ModuleError, "got configure_optimizers(lr)", "define configure_optimizers(self)")
def optimizers_with_an_argument() -> None:
    class Rate(Regression):
        def configure_optimizers(self, lr: float) -> Any:  # type: ignore[override]
            return SGD(self.parameters(), lr=lr)

    fit(Rate())


@tour.answered_by(ModuleError, "optimizer_idx", "define optimizer_step(self, epoch, batch_idx, optimizer,")
def the_optimizer_step_of_lightning_1() -> None:
    class Old(Regression):
        def optimizer_step(  # type: ignore[override]
            self, epoch: int, batch_idx: int, optimizer: Any, optimizer_idx: int, closure: Any, on_tpu: bool
        ) -> None:
            optimizer.step(closure)

    fit(Old())


@tour.answered_by(ModuleError, "got transfer_batch_to_device(batch)", "(self, batch, device, dataloader_idx)")
def a_transfer_with_too_few_arguments() -> None:
    class Few(Regression):
        def transfer_batch_to_device(self, batch: Any) -> Any:  # type: ignore[override]
            return batch

    fit(Few())


@tour.answered_by(ModuleError, "Data.setup must take (stage), got setup()", "define setup(self, stage)")
def a_setup_of_data_without_its_stage() -> None:
    class Data(DataModule):
        def setup(self) -> None:  # type: ignore[override]
            pass

        def train_dataloader(self) -> Any:
            return loader()

    quiet(max_epochs=1).fit(Regression(), Data())


@tour.answered_by(RunError, "roll_back was called inside an optimizer step", "call it in on_train_step_end")
def a_roll_back_inside_a_step() -> None:
    class Back(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                self.trainer.roll_back()
            return super().training_step(batch, batch_idx)

    fit(Back(), enable_checkpointing=True, callbacks=ModelCheckpoint("runs", every_n_train_steps=1))


# --- what it logs ---


@tour.answered_by(ModuleError, "self.log('accuracies', ...)", "shape (2,)", "log its mean")
def a_metric_with_two_numbers() -> None:
    class Two(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("accuracies", torch.ones(2))

    fit(Two())


@tour.answered_by(ModuleError, "self.log('verdict', ...)", "'good'", "convert it")
def a_metric_that_is_a_string() -> None:
    class String(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("verdict", "good")

    fit(String())


@tour.answered_by(ModuleError, "self.log('report', ...)", "log_dict")
def a_dict_for_log() -> None:
    class Dict(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("report", {"a": 1.0})

    fit(Dict())


@tour.answered_by(ModuleError, "self.log_dict must get a dict", "float (0.5)", "use self.log")
def a_number_for_log_dict() -> None:
    class Number(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log_dict(0.5)  # type: ignore[arg-type]

    fit(Number())


@tour.answered_by(ModuleError, "self.log('x')", "'mean'", "got 'median'", "give one of them")
def an_unknown_reduction() -> None:
    class Median(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("x", 1.0, reduce_fx="median")  # type: ignore[arg-type]

    fit(Median())


@tour.answered_by(ModuleError, "self.log('x'", "batch_size", "got -1", "leave it out")
def a_negative_batch_size_of_log() -> None:
    class Negative(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("x", 1.0, batch_size=-1)

    fit(Negative())


@tour.answered_by(UserWarning, "self.log('x', ...)", "not registered", "fit the module first")
def a_metric_outside_of_a_run() -> None:
    Regression().log("x", 1.0)


@tour.answered_by(ModuleError, "self.log('x', ...)", "predict", "return")
def a_metric_in_predict() -> None:
    class Predicts(Regression):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", 1.0)

    quiet().predict(Predicts(), loader())


@tour.answered_by(RunError, "Regression is not attached to a `Trainer`", "trainer.fit(module)")
def the_trainer_before_a_run() -> None:
    _ = Regression().trainer


@tour.answered_by(AttributeError, "no hyper-parameter 'learning_rate'", "Choose one of: lr")
def a_hyperparameter_that_was_not_saved() -> None:
    class Hyper(Regression):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters()

        def configure_optimizers(self) -> Any:
            return SGD(self.parameters(), lr=self.hparams.learning_rate)

    fit(Hyper())


@pytest.mark.timeout(60)
@tour.cases
def test_a_mistake_in_a_hook_is_answered(mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mistake.check()
