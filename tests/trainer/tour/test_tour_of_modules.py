"""A tour of mistakes in a module: its construction, steps and optimizers. Each is answered within 15 seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
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


@tour.answered_by(ModuleError, "must take a batch", "training_step(dataloader_iter)", "accumulate_grad_batches")
def a_step_that_takes_the_loader() -> None:
    class Iterating(Regression):
        def training_step(self, dataloader_iter: Any) -> Any:
            return self.net(next(dataloader_iter)[0]).sum()

    fit(Iterating())


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


@tour.answered_by(UserWarning, "All 2 parameters of Regression are frozen", "call requires_grad_()")
def everything_frozen() -> None:
    module = Regression()
    module.freeze()
    with pytest.raises(ModuleError, match=r"none of the 2 parameters of Regression has requires_grad=True; set it"):
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


@tour.answered_by(ModuleError, "in this order, got training_step(batch_idx, batch)", "(self, batch, batch_idx)")
def a_step_with_its_arguments_exchanged() -> None:
    class Exchanged(Regression):
        def training_step(self, batch_idx: int, batch: Any) -> Any:  # type: ignore[override]
            return self(batch[0]).mean()

    fit(Exchanged())


@tour.answered_by(ModuleError, "validation_step must take a batch", "validation_step(dataloader_iter)")
def a_validation_step_that_takes_the_loader() -> None:
    class Iterating(Regression):
        def validation_step(self, dataloader_iter: Any) -> None:
            next(dataloader_iter)

    fit(Iterating())


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


@tour.answered_by(ModuleError, "Loss.count", "got -2", "give the number of units")
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


@tour.answered_by(UserWarning, "EarlyStopping(monitor='val_loss') got nan", "NaNGuard")
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


@tour.answered_by(ModuleError, "the class SGD", "return SGD(self.parameters())")
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


@tour.answered_by(ModuleError, "attached with an optimizer", "return both")
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


@tour.answered_by(ModuleError, "must be", "got 'steps'", "give one")
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


@tour.answered_by(ValueError, "metric val_los,", "['val_loss']", "strict=False")
def a_plateau_scheduler_with_a_misspelt_metric() -> None:
    class Plateau(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", 1.0)

        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=0.1)
            scheduler = {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "val_los"}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    fit(Plateau())


@pytest.mark.timeout(60)
@tour.cases
def test_a_mistake_in_a_module_is_answered(mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mistake.check()
