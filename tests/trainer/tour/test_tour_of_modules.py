"""A tour of mistakes in a module: its steps, optimizers, hooks, what it logs. Each is answered within 15 seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small import Regression, loader, quiet
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from tour import Mistake, Tour

from echelon import EarlyStopping, Loss, ModuleError, RunError, TrainModule

tour = Tour()


def fit(module: Any, **settings: Any) -> None:
    quiet(**{"max_epochs": 1, **settings}).fit(module, loader(), loader())


# --- its construction ---


@tour.answered_by(AttributeError, "cannot assign module before Module.__init__() call")
def a_module_that_forgets_super() -> None:
    class NoSuper(Regression):
        def __init__(self) -> None:
            self.net = nn.Linear(2, 1)

    NoSuper()


@tour.answered_by(ModuleError, "NoSuper.__init__ must call super().__init__()", "call it first")
def a_module_that_forgets_super_and_has_no_layers() -> None:
    class NoSuper(Regression):
        def __init__(self) -> None:
            self.width = 3

    fit(NoSuper())


@tour.answered_by(ValueError, "empty parameter list", "nn.ModuleList")
def layers_in_a_plain_list() -> None:
    class Layers(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(2, 1)]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layers[0](batch[0]).mean()

        def configure_optimizers(self) -> Any:
            return SGD(self.parameters(), lr=0.1)

    quiet(max_epochs=1).fit(Layers(), loader())


@tour.answered_by(UserWarning, "late.weight, late.bias of Late", "in no optimizer", "configure_model")
def parameters_made_after_the_optimizers() -> None:
    class Late(Regression):
        def on_fit_start(self) -> None:
            self.late = nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.late(self(batch[0])).mean()

    fit(Late())


@tour.answered_by(
    ModuleError, "none of the 2 parameters of Regression has requires_grad=True", "set it on those to train"
)
def everything_frozen() -> None:
    module = Regression()
    module.freeze()
    fit(module)


# --- its steps ---


@tour.answered_by(ModuleError, "got training_step()", "define training_step(self, batch, batch_idx)")
def a_step_with_too_few_arguments() -> None:
    class Few(Regression):
        def training_step(self) -> Any:  # type: ignore[override]
            return None

    fit(Few())


@tour.answered_by(
    ModuleError, "got training_step(batch, batch_idx, extra)", "define training_step(self, batch, batch_idx)"
)
def a_step_with_too_many_arguments() -> None:
    class Many(Regression):
        def training_step(self, batch: Any, batch_idx: int, extra: int) -> Any:  # type: ignore[override]
            return None

    fit(Many())


@tour.answered_by(ModuleError, "optimizer_idx", "automatic_optimization = False")
def a_step_with_an_optimizer_index() -> None:
    class Indexed(Regression):
        def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int) -> Any:  # type: ignore[override]
            return None

    fit(Indexed())


@tour.answered_by(UserWarning, "training_step returned None for all 4 batches of epoch 0", "return the loss")
def a_step_that_returns_nothing() -> None:
    class Nothing(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            nn.functional.mse_loss(self(batch[0]), batch[1])

    fit(Nothing())


@tour.answered_by(ModuleError, "loss of shape (2, 1)", "loss.mean()")
def a_loss_for_each_sample() -> None:
    class PerSample(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch[0])

    fit(PerSample())


@tour.answered_by(ModuleError, "loss without gradient", "without .detach()")
def a_detached_loss() -> None:
    class Detached(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch[0]).mean().detach()

    fit(Detached())


@tour.answered_by(ModuleError, "float", "scalar tensor")
def a_loss_as_a_number() -> None:
    class Number(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch[0]).mean().item()

    fit(Number())


@tour.answered_by(ModuleError, "Loss.count", "got -2", "give how many there are")
def a_loss_with_a_negative_count() -> None:
    class Negative(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return Loss(self(batch[0]).sum(), -2)

    fit(Negative())


@tour.answered_by(RuntimeError, "backward through the graph a second time", "return the loss without loss.backward()")
def a_step_that_calls_backward_itself() -> None:
    class Backward(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self(batch[0]).mean()
            loss.backward()
            return loss

    fit(Backward())


@tour.answered_by(RunError, "automatic_optimization", "return the loss instead")
def a_step_that_calls_manual_backward_in_automatic_mode() -> None:
    class Manual(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.manual_backward(self(batch[0]).mean())

    fit(Manual())


@tour.answered_by(UserWarning, "SGD.step() was called with automatic_optimization=True", "drop the call")
def a_step_that_steps_the_optimizer_in_automatic_mode() -> None:
    class Steps(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self(batch[0]).mean()
            self.optimizers().step()
            return loss

    fit(Steps())


@tour.answered_by(ModuleError, "training_step", "generator", "return")
def a_step_that_yields() -> None:
    class Yields(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            yield self(batch[0]).mean()

    fit(Yields())


# --- numbers that are none ---


@tour.answered_by(UserWarning, "loss", "nan", "global_step 1", "NaNGuard")
def a_loss_that_is_nan() -> None:
    class NotANumber(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch[0]).mean() * float("nan")

    fit(NotANumber(), log_every_n_steps=1)


@tour.answered_by(UserWarning, "loss is nan at global_step 2", "NaNGuard()")
def a_gradient_that_is_infinite() -> None:
    class Infinite(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return (self(batch[0]) - self(batch[0])).abs().sqrt().sum()

    fit(Infinite(), log_every_n_steps=1, gradient_clip_val=1.0)


@tour.answered_by(UserWarning, "val_loss", "nan", "NaNGuard")
def a_monitored_metric_that_is_nan() -> None:
    class NotANumber(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", float("nan"))

    fit(NotANumber(), callbacks=EarlyStopping("val_loss", check_finite=False))


# --- its optimizers ---


@tour.answered_by(UserWarning, "net.weight is in 2 optimizers (SGD and Adam)", "automatic_optimization = False")
def two_optimizers_in_automatic_mode() -> None:
    class Two(Regression):
        def configure_optimizers(self) -> Any:
            return [SGD(self.parameters(), lr=0.1), Adam(self.parameters(), lr=0.1)]

    fit(Two())


@tour.answered_by(UserWarning, "Unreturned.configure_optimizers returned None", "`return` missing")
def optimizers_that_are_not_returned() -> None:
    class Unreturned(Regression):
        def configure_optimizers(self) -> None:
            SGD(self.parameters(), lr=0.1)

    fit(Unreturned())


@tour.answered_by(ModuleError, "type", "SGD", "return a torch optimizer")
def an_optimizer_class() -> None:
    class Class(Regression):
        def configure_optimizers(self) -> Any:
            return SGD

    fit(Class())


@tour.answered_by(ModuleError, "SGD holds 2 parameters, none of which is the module's", "self.parameters()")
def an_optimizer_over_another_module() -> None:
    class Other(Regression):
        def configure_optimizers(self) -> Any:
            return SGD(nn.Linear(2, 1).parameters(), lr=0.1)

    fit(Other())


@tour.answered_by(ModuleError, "belongs to an optimizer", "return both")
def a_scheduler_of_another_optimizer() -> None:
    class Other(Regression):
        def configure_optimizers(self) -> Any:
            mine, other = SGD(self.parameters(), lr=0.1), SGD(self.parameters(), lr=0.1)
            return [mine], [StepLR(other, 1)]

    fit(Other())


@tour.answered_by(ModuleError, "StepLR", "([optimizers], [schedulers])")
def a_scheduler_beside_the_optimizer() -> None:
    class Beside(Regression):
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=0.1)
            return optimizer, StepLR(optimizer, 1)

    fit(Beside())


@tour.answered_by(RuntimeWarning, "'lr_schedulers'", "Did you mean 'lr_scheduler'?")
def a_misspelt_key_of_the_optimizers() -> None:
    class Misspelt(Regression):
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=0.1)
            return {"optimizer": optimizer, "lr_schedulers": StepLR(optimizer, 1)}

    fit(Misspelt())


@tour.answered_by(ModuleError, "'epoch' or 'step', got 'steps'", "give one")
def a_misspelt_interval_of_a_scheduler() -> None:
    class Misspelt(Regression):
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=0.1)
            scheduler = {"scheduler": StepLR(optimizer, 1), "interval": "steps"}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    fit(Misspelt())


@tour.answered_by(ModuleError, "ReduceLROnPlateau", "monitor=None", "'monitor'")
def a_plateau_scheduler_without_a_metric() -> None:
    class Plateau(Regression):
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=0.1)
            return [optimizer], [ReduceLROnPlateau(optimizer)]

    fit(Plateau())


@tour.answered_by(ValueError, "'val_los'", "['val_loss']", "strict=False")
def a_plateau_scheduler_with_a_misspelt_metric() -> None:
    class Plateau(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", 1.0)

        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=0.1)
            scheduler = {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "val_los"}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    fit(Plateau())


# --- its hooks ---


@tour.answered_by(UserWarning, "on_train_epoch_ends", "Did you mean 'on_train_epoch_end'?")
def a_misspelt_hook() -> None:
    class Misspelt(Regression):
        def on_train_epoch_ends(self) -> None:
            pass

    fit(Misspelt())


@tour.answered_by(ModuleError, "Old.training_epoch_end is never called", "define on_train_epoch_end(self)")
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


@tour.answered_by(UserWarning, "self.log('x', ...)", "without a trainer", "fit the module first")
def a_metric_outside_of_a_run() -> None:
    Regression().log("x", 1.0)


@tour.answered_by(ModuleError, "self.log('x', ...)", "predict", "return")
def a_metric_in_predict() -> None:
    class Predicts(Regression):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", 1.0)

    quiet().predict(Predicts(), loader())


@tour.answered_by(RunError, "Regression.trainer is None", "trainer.fit(module)")
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


@pytest.mark.timeout(15)
@tour.cases
def test_a_mistake_in_a_module_is_answered(mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mistake.check()
