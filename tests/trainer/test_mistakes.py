"""A user's mistake gives one clear error at once: what is wrong, the value found, what to do; before data is read.

Mistakes in settings are in test_settings.py, in config files in test_config.py, in arguments of callbacks and loggers
with theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small import Noted, Regression, indices, loader, quiet, raises, samples
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

from echelon import (
    Callback,
    CheckpointError,
    ConfigError,
    DataError,
    DataModule,
    EarlyStopping,
    Loss,
    ModelCheckpoint,
    ModuleError,
    RunError,
    TrainModule,
)

PARAMETER = nn.Parameter(torch.zeros(1))


def fit_unread(module: Any, **settings: Any) -> None:
    """Fit on data that must not be read before the error."""
    data = Noted()
    try:
        quiet(**settings).fit(module, DataLoader(data, 2), DataLoader(data, 2))
    finally:
        assert data.reads == []


# --- the module ---


class NoStep(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)


class MisspeltStep(NoStep):
    def train_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).sum()


class NoOptimizer(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).sum()


class MisspeltOptimizer(NoOptimizer):
    def configure_optimizer(self) -> Any:
        return SGD(self.parameters(), lr=0.1)


class Lookalike:
    """A stand-in for how a LightningModule would look to us."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


@pytest.mark.parametrize(
    ("module", "error", "parts"),
    [
        (
            NoStep(),
            ModuleError,
            ["No `training_step()` method defined in NoStep", "define training_step(self, batch, batch_idx)"],
        ),
        (MisspeltStep(), ModuleError, ["No `training_step()` method defined in MisspeltStep", "'train_step' meant"]),
        (NoOptimizer(), ModuleError, ["No `configure_optimizers()` method defined in NoOptimizer", "torch.optim.Adam"]),
        (MisspeltOptimizer(), ModuleError, ["No `configure_optimizers()`", "'configure_optimizer' meant"]),
        (nn.Linear(2, 1), ConfigError, ["Trainer.fit got a Linear", "derive its class from echelon.TrainModule"]),
        (Lookalike(), ConfigError, ["Trainer.fit got a Lookalike", "pass a TrainModule"]),
        (Regression, ConfigError, ["Trainer.fit got a type", "Regression", "pass a TrainModule"]),
        (None, ConfigError, ["Trainer.fit got a NoneType", "pass a TrainModule"]),
    ],
)
def test_a_module_that_cannot_be_trained_is_refused_unread(module: Any, error: Any, parts: list[str]) -> None:
    with raises(error, *parts):
        fit_unread(module)


def returning(configured: Callable[[TrainModule], Any]) -> TrainModule:
    class Configured(Regression):
        def configure_optimizers(self) -> Any:
            return configured(self)

    return Configured()


def sgd(module: TrainModule) -> SGD:
    return SGD(module.parameters(), lr=0.1)


def with_scheduler(module: TrainModule, **config: Any) -> Any:
    optimizer = sgd(module)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1), **config}}


@pytest.mark.parametrize(
    ("configured", "parts"),
    [
        (lambda m: "adam", ["returned str ('adam')", "return a torch optimizer"]),
        (lambda m: [sgd(m), "adam"], ["returned str ('adam')", "return a torch optimizer"]),
        (lambda m: SGD([PARAMETER], lr=1.0), ["SGD holds 1 parameters, none of which", "self.parameters()"]),
        (lambda m: {"optimiser": sgd(m)}, ["the keys ['optimiser']", "under the key 'optimizer'"]),
        (lambda m: {"lr_scheduler": None}, ["the keys ['lr_scheduler']", "give the optimizer under"]),
        (lambda m: with_scheduler(m, interval="batch"), ['must be "step" or "epoch", got \'batch\'']),
        (lambda m: with_scheduler(m, frequency=0), ["frequency must be an int of at least 1, got 0"]),
        (lambda m: ([o := sgd(m)], [ReduceLROnPlateau(o)]), ["ReduceLROnPlateau", "monitor=None", "'monitor'"]),
        (
            lambda m: ([sgd(m)], [StepLR(sgd(m), 1)]),
            ["StepLR is attached with an optimizer that wasn't returned", "return both"],
        ),
        (lambda m: ([sgd(m)], ["StepLR"]), ["'StepLR'", "it has no step()", "torch scheduler"]),
        (lambda m: ([sgd(m)], [{"interval": "step"}]), ["['interval']", "add it"]),
    ],
)
def test_what_configure_optimizers_may_not_return_is_refused_unread(configured: Any, parts: list[str]) -> None:
    with raises(ModuleError, *parts):
        fit_unread(returning(configured))


def test_accumulation_and_clipping_are_refused_where_the_module_optimizes_itself() -> None:
    module = Regression()
    module.automatic_optimization = False
    with raises(ConfigError, "accumulate_grad_batches=2", "Regression.automatic_optimization is False", "drop"):
        fit_unread(module, accumulate_grad_batches=2)
    with raises(ConfigError, "gradient_clip_val=1.0", "automatic_optimization is False"):
        fit_unread(module, gradient_clip_val=1.0)


# --- what training_step returns ---


def stepping(step: Callable[[TrainModule, Any], Any]) -> TrainModule:
    class Stepping(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return step(self, batch)

    return Stepping()


def mean(module: Any, batch: Any) -> Tensor:
    return module.net(batch[0]).mean()


@pytest.mark.parametrize(
    ("step", "parts"),
    [
        (lambda m, b: mean(m, b).detach(), ["loss without gradient", "value ", "without .detach()"]),
        (lambda m, b: m.net(b[0]), ["loss of shape (2, 1)", "loss.mean()"]),
        (lambda m, b: mean(m, b).item(), ["returned float", "scalar tensor"]),
        (lambda m, b: (mean(m, b), 1), ["returned tuple", "scalar tensor"]),
        (lambda m, b: {"los": mean(m, b)}, ["a dict with the keys", "['los']", "the 'loss' key"]),
        (lambda m, b: Loss(m.net(b[0]), 2), ["loss of shape (2, 1)"]),
    ],
)
def test_a_loss_that_cannot_be_minimised_is_refused_at_the_first_batch(step: Any, parts: list[str]) -> None:
    data = Noted()
    with raises(ModuleError, *parts):
        quiet(max_epochs=1).fit(stepping(step), DataLoader(data, 2))
    assert data.reads == [0, 1]


@pytest.mark.parametrize(
    ("log", "parts"),
    [
        (lambda m: m.log("x", torch.ones(2)), ["self.log('x', ...)", "one number", "shape (2,)", "log its mean"]),
        (lambda m: m.log("x", "high"), ["self.log('x', ...)", "a number", "str ('high')", "convert it"]),
        (lambda m: m.log(3, 1.0), ["self.log must be a string, got 3"]),
        (lambda m: m.log("x", 1.0, on_step=False, on_epoch=False), ["goes nowhere", "set one of them"]),
        (lambda m: (m.log("x", 1.0), m.log("x", 1.0, prog_bar=True)), ["'x'", "in two ways", "two names"]),
    ],
)
def test_what_cannot_be_logged_is_refused(log: Any, parts: list[str]) -> None:
    with raises(ModuleError, *parts):
        quiet(max_epochs=1).fit(stepping(lambda m, b: (log(m), mean(m, b))[1]), loader())


# --- data ---


@pytest.mark.parametrize(
    ("data", "error", "parts"),
    [
        ([(torch.ones(2, 2), torch.ones(2, 1))] * 2, DataError, ["holds tensors", "4", "DataLoader(batches"]),
        ({"a": torch.ones(2, 2)}, DataError, ["train_dataloaders", "holds tensors", "batch_size=None"]),
        ([], DataError, ["training loaders are empty", "[]"]),
        (samples(), DataError, ["TensorDataset is a dataset", "pass DataLoader(dataset, batch_size=...)"]),
        (3, DataError, ["3 is not a loader", "int", "pass a DataLoader"]),
        (None, ModuleError, ["no training loader", "train_dataloader", "pass one to fit()"]),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(data: Any, error: Any, parts: list[str]) -> None:
    with raises(error, *parts):
        quiet(max_epochs=1).fit(Regression(), data)


def test_a_data_module_that_is_none_is_refused() -> None:
    with raises(ConfigError, "datamodule=", "is a DataLoader", "pass an echelon.DataModule, or pass loaders"):
        quiet().fit(Regression(), datamodule=loader())
    with raises(ModuleError, "no training loader"):
        quiet().fit(Regression(), datamodule=DataModule())


def test_a_fraction_that_leaves_no_batch_is_refused() -> None:
    with raises(ConfigError, "limit_train_batches=0.1 of 4 batches", "at least 0.25"):
        quiet(limit_train_batches=0.1).fit(Regression(), loader())


def test_a_fraction_of_data_without_a_length_is_refused() -> None:
    with raises(ConfigError, "has no length", "Trainer(limit_train_batches)", "got 0.5", "batches as an int"):
        quiet(limit_train_batches=0.5).fit(Regression(), iter([[torch.ones(1, 2), torch.ones(1, 1)]]))


def test_global_batch_size_needs_a_loader_that_makes_batches() -> None:
    ready_made = DataLoader(samples(), batch_size=None)
    with raises(ConfigError, "global_batch_size=8 needs one DataLoader", "accumulate_grad_batches"):
        quiet(global_batch_size=8).fit(Regression(), ready_made)


# --- metrics that are asked for ---


@pytest.mark.parametrize(
    ("callback", "parts"),
    [
        (
            ModelCheckpoint(monitor="val_los"),
            ["ModelCheckpoint(monitor='val_los')", "'val_loss'", "were logged: monitor"],
        ),
        (
            EarlyStopping("val_los"),
            ["EarlyStopping(monitor='val_los')", "'val_loss'", "were logged: monitor"],
        ),
    ],
)
def test_a_monitored_metric_that_was_never_logged_is_named_with_those_that_were(
    tmp_path: Path, callback: Callback, parts: list[str]
) -> None:
    class Logging(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", 1.0)

    with raises(ConfigError, *parts):
        quiet(tmp_path, callbacks=callback, enable_checkpointing=True).fit(Logging(), loader(), loader())


def test_a_metric_that_a_scheduler_lacks_is_named_with_those_there_are() -> None:
    class Plateau(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", loss := mean(self, batch))
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = sgd(self)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "val_loss"},
            }

    with raises(ConfigError, "conditioned on metric val_loss, which is not available", "['loss']", "strict=False"):
        quiet(max_epochs=1).fit(Plateau(), loader())


# --- checkpoints and runs ---


def test_a_ckpt_path_that_is_absent_a_file_or_foreign_is_refused_unread(tmp_path: Path) -> None:
    data = DataLoader(Noted(), 2)
    (tmp_path / "model.ckpt").write_bytes(b"PK")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "weights.bin").touch()
    with raises(CheckpointError, f"ckpt_path={str(tmp_path / 'modl.ckpt')!r} does not exist", "has model.ckpt"):
        quiet().fit(Regression(), data, ckpt_path=tmp_path / "modl.ckpt")
    with raises(CheckpointError, "model.ckpt' is a file", "not a checkpoint of Echelon's", "echelon.load_weights"):
        quiet().fit(Regression(), data, ckpt_path=tmp_path / "model.ckpt")
    with raises(CheckpointError, "foreign' is not a checkpoint", "manifest.json", "weights.bin", "give another"):
        quiet().fit(Regression(), data, ckpt_path=tmp_path / "foreign")
    with raises(ConfigError, "ckpt_path='best'", "got none in", "pass a path"):
        quiet().test(Steps(), data, ckpt_path="best")
    assert data.dataset.reads == []


class Steps(Regression):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        pass


class NoForward(NoStep):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return mean(self, batch)


@pytest.mark.parametrize(
    ("task", "parts"),
    [
        ("validate", ["No `validation_step()` method defined in NoForward", "trainer.validate()"]),
        ("test", ["No `test_step()` method defined in NoForward", "trainer.test()"]),
        ("predict", ["No `predict_step()` method defined in NoForward, nor forward", "trainer.predict()"]),
    ],
)
def test_a_task_whose_step_is_missing_is_refused_unread(task: str, parts: list[str]) -> None:
    data = Noted()
    with raises(ModuleError, *parts):
        getattr(quiet(), task)(NoForward(), DataLoader(data, 2))
    assert data.reads == []


@pytest.mark.parametrize("task", ["validate", "test", "predict"])
def test_a_task_without_a_module_or_data_is_refused(task: str) -> None:
    with raises(ConfigError, f"Trainer.{task} was called with model=None", "pass the module"):
        getattr(quiet(), task)()
    with raises(ModuleError, f"no loader to {task}", f"pass one to {task}()"):
        getattr(quiet(), task)(Steps())


def test_a_fit_inside_a_fit_is_refused_and_the_outer_one_can_go_on() -> None:
    class Nested(Regression):
        def on_train_start(self) -> None:
            with raises(RunError, "Trainer.fit was called while fit runs", "use another Trainer"):
                self.trainer.fit(self, loader())

    module = Nested()
    quiet(max_epochs=1).fit(module, loader())
    assert indices(module.seen) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_what_only_a_run_has_is_refused_before_one() -> None:
    with raises(RunError, "must be a run, found None", "call fit"):
        quiet().save_checkpoint("x.ckpt")
    with raises(RunError, "Regression is not attached to a `Trainer`", "trainer.fit(module)"):
        _ = Regression().trainer
    with pytest.warns(UserWarning, match=r"self\.log\('x', \.\.\.\): the `self.trainer` reference is not"):
        Regression().log("x", 1.0)


# --- what Lightning 1.x had, and what 2.6 refuses ---


class TrainingEpochEnd(Regression):
    def training_epoch_end(self, outputs: Any) -> None: ...


class ValidationEpochEnd(Regression):
    def validation_epoch_end(self, outputs: Any) -> None: ...


@pytest.mark.parametrize(
    ("module", "parts"),
    [
        (TrainingEpochEnd(), ["TrainingEpochEnd.training_epoch_end must be on_train_epoch_end", "keep the outputs"]),
        (ValidationEpochEnd(), ["validation_epoch_end must be on_validation_epoch_end", "rename it"]),
    ],
)
def test_an_epoch_end_hook_that_took_outputs_is_refused_unread(module: Any, parts: list[str]) -> None:
    with raises(ModuleError, *parts):
        fit_unread(module)


def test_other_removed_hooks_are_pointed_out() -> None:
    class OnEpochStart(Regression):
        def on_epoch_start(self) -> None: ...

    class OnBatchEnd(Callback):
        def on_batch_end(self, trainer: Any, module: Any) -> None: ...

    with pytest.warns(UserWarning, match=r"OnBatchEnd.on_batch_end is a hook of Lightning 1.x .* on_train_batch_end"):
        trainer = quiet(max_epochs=1, callbacks=OnBatchEnd())
    with pytest.warns(UserWarning, match=r"OnEpochStart.on_epoch_start .* use on_train_epoch_start"):
        trainer.fit(OnEpochStart(), loader())


def test_a_module_of_which_everything_is_frozen_is_named() -> None:
    module = Regression().requires_grad_(False)
    with (
        raises(ModuleError, "loss without gradient"),
        pytest.warns(UserWarning, match=r"All 2 parameters of Regression are frozen, such as 'net.weight'"),
    ):
        quiet(max_epochs=1).fit(module, loader())


@pytest.mark.parametrize("task", ["fit", "validate", "test", "predict"])
def test_loaders_beside_a_data_module_are_refused(task: str) -> None:
    with raises(ConfigError, f"Trainer.{task} must get loaders or a data module", "got both (DataModule)", "one of"):
        getattr(quiet(max_epochs=1), task)(Regression(), loader(), datamodule=DataModule())


def test_methods_that_are_none_on_the_instance_are_not_there() -> None:
    module: Any = Regression()
    module.val_dataloader = module.validation_step = module.predict_step = None
    quiet(max_epochs=1).fit(module, loader())
    with raises(ModuleError, "No `validation_step()`"):
        quiet().validate(module, loader())
    with raises(ModuleError, "No `predict_step()`"):
        quiet().predict(module, loader())


def test_a_checkpoint_behind_a_url_that_is_not_possible_is_refused(tmp_path: Path) -> None:
    with raises(ConfigError, "ckpt_path=", "'s3://bucket/a.ckpt'", "a query"):
        quiet(max_epochs=1).fit(Regression(), loader(), ckpt_path="s3://bucket/a.ckpt?versionId=1")
    trainer = quiet(tmp_path, max_epochs=1)
    trainer.fit(Regression(), loader())
    with raises(ConfigError, "filepath=", "'memery'", "memory"):
        trainer.save_checkpoint("memery://a.ckpt")
    with raises(ConfigError, "storage_options must be None", "{'key': 1}"):
        trainer.save_checkpoint(tmp_path / "a.ckpt", storage_options={"key": 1})  # type: ignore[arg-type]


def test_a_resume_with_nothing_left_to_train_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = quiet(max_epochs=1)
    trainer.fit(Regression(), loader())
    trainer.save_checkpoint(tmp_path / "done.ckpt")
    with caplog.at_level("WARNING", "echelon"):
        quiet(max_epochs=1).fit(Regression(), loader(), ckpt_path=tmp_path / "done.ckpt")
    [said] = [record.getMessage() for record in caplog.records if "Nothing is left" in record.getMessage()]
    assert "epoch 1 and global_step 4, with max_epochs=1 and max_steps=-1; raise them, or the limit" in said


def test_an_evaluation_step_that_needs_the_index_of_its_loader_gets_it() -> None:
    class Indexed(Regression):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:  # type: ignore[override]
            self.validated.append(dataloader_idx)

        def test_step(self, batch: Any, batch_idx: int, temperature: float = 0.5) -> None:  # type: ignore[override]
            self.validated.append(temperature)

    module = Indexed()
    quiet(max_epochs=1).fit(module, loader(), loader(4))
    quiet().test(module, loader(4))
    assert module.validated == [0, 0, 0.5, 0.5]
