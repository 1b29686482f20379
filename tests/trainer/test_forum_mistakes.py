"""Mistakes that are asked about in public threads: each is pointed out, and its right neighbour is left alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small import Regression, loader, quiet, raises, samples
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from echelon import (
    BackboneFinetuning,
    BasePredictionWriter,
    ConfigError,
    DataError,
    DataModule,
    EarlyStopping,
    ModelCheckpoint,
    ModuleError,
    StochasticWeightAveraging,
    TensorBoardLogger,
)
from echelon.trainer.cli.main import main


def fit(module: Any, **settings: Any) -> Any:
    trainer = quiet(**{"max_epochs": 3, **settings})
    trainer.fit(module, loader(), loader())
    return trainer


def warns(text: str) -> Any:
    return pytest.warns(UserWarning, match=re.escape(text))


# --- what a module keeps ---


class Keeping(Regression):
    """Keeps what its steps and validations return, in a list or in two parameters of a dict."""

    def __init__(self, *, detaches: bool, clears: bool, in_dict: bool = False) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.results: list[Tensor] = []
        self.detaches, self.clears = detaches, clears
        self.weights = {"a": {"w": nn.Parameter(torch.zeros(1))}}
        self.in_dict = in_dict

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach() if self.detaches else loss)
        return loss + self.weights["a"]["w"].sum() if self.in_dict else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.results.append(self(batch[0]))

    def on_validation_epoch_end(self) -> None:
        torch.stack(self.results)
        if self.clears:
            self.results.clear()


def test_results_that_are_kept_are_pointed_out(caplog: Any) -> None:
    with warns("Keeping.losses has grown with each step, and keeps the graphs"):
        fit(Keeping(detaches=False, clears=True))
    assert "results" not in caplog.text
    fit(Keeping(detaches=True, clears=False))
    assert "The list results of Keeping, which on_validation_epoch_end reads, still has the results" in caplog.text
    with warns("Keeping.weights holds 1 parameters that get gradients, but no optimizer has them"):
        fit(Keeping(detaches=True, clears=True, in_dict=True))


class Measured(Regression):
    """Has one metric object for training and validation, or one that it never resets."""

    def __init__(self, *, is_shared: bool) -> None:
        torchmetrics = pytest.importorskip("torchmetrics")
        super().__init__()
        self.mean, self.is_shared = torchmetrics.MeanMetric(), is_shared

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.is_shared:
            self.mean(1.0)
            self.log("train", self.mean, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.mean(2.0)
        if self.is_shared:
            self.log("val", self.mean)

    def on_validation_epoch_end(self) -> None:
        if not self.is_shared:
            self.mean.compute()


@pytest.mark.filterwarnings("ignore:The ``compute`` method", "ignore:'train' is nan")
def test_metric_objects_that_are_shared_or_never_reset_are_pointed_out(caplog: Any) -> None:
    with warns("MeanMetric is logged as 'train' in train and as 'val' in validate"):
        fit(Measured(is_shared=True))
    fit(Measured(is_shared=False))
    assert "The metric mean of Measured, which on_validation_epoch_end reads, still has" in caplog.text


def test_a_metric_that_each_batch_makes_anew_is_refused() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Makes(Regression):
        def on_validation_epoch_start(self) -> None:
            self.metric = torchmetrics.MeanMetric()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            metric = self.metric if self.is_right else torchmetrics.MeanMetric()
            metric(float(batch_idx))
            self.log("mean", metric)

    module: Any = Makes()
    module.is_right = True
    assert float(fit(module).callback_metrics["mean"]) == 1.5
    module.is_right = False
    with raises(ModuleError, "self.log('mean', metric) got another MeanMetric", "make one MeanMetric in __init__"):
        fit(module)


# --- what a step returns ---


class Returning(Regression):
    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.change = change

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.change(super().training_step(batch, batch_idx))


def test_what_nothing_logs_in_a_returned_dict_is_pointed_out() -> None:
    with warns("training_step returned 'log' beside the loss, which nothing logs; call self.log_dict({'x': ...})"):
        fit(Returning(lambda loss: {"loss": loss, "log": {"x": loss}}))
    fit(Returning(lambda loss: {"loss": loss, "log": 0.0, "outputs": loss}))

    class Reads(Returning):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert outputs["log"]

    fit(Reads(lambda loss: {"loss": loss, "log": {"x": loss}}))


def test_a_loss_that_depends_on_no_parameter_is_refused() -> None:
    with raises(ModuleError, "a loss that depends on no parameter", "0 * output.sum()"):
        fit(Returning(lambda loss: torch.zeros((), requires_grad=True)))
    fit(Returning(lambda loss: 0 * loss))


def test_a_layer_called_as_a_class_has_a_remedy() -> None:
    class Calls(Regression):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.net(nn.ReLU(x))  # type: ignore[arg-type]
            return out

    with pytest.raises(TypeError, match="must be Tensor, not ReLU") as info:
        fit(Calls())
    assert any("make it once, as nn.ReLU()" in note for note in info.value.__notes__)


def test_an_argument_of_log_at_the_wrong_place_is_named() -> None:
    class Logs(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("x", 1.0, self.current_epoch)  # type: ignore[arg-type]

    with raises(ModuleError, "prog_bar=0 and 1", "name each argument after self.log(name, value, ...)"):
        fit(Logs())


def test_a_writer_of_tensorboard_is_found(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with pytest.raises(AttributeError, match=r"call self.logger.experiment.add_scalar\(...\)"):
        TensorBoardLogger(tmp_path).add_scalar("x", 1, 1)


# --- data ---


class Parts(DataModule):
    """Sets one data set in prepare_data and others in setup, but none to test."""

    def prepare_data(self) -> None:
        self.raw = 1

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.train_set = samples()

    def train_dataloader(self) -> Any:
        return DataLoader(self.train_set, 2)

    def valid_dataloader(self) -> Any:
        return loader()

    def test_dataloader(self) -> Any:
        return DataLoader(self.test_set, 2)


class Evaluated(Regression):
    def test_step(self, batch: Any, batch_idx: int) -> None: ...


def test_attributes_that_a_data_module_lacks_are_explained() -> None:
    with pytest.raises(AttributeError, match=r"which Parts.setup sets in some stage.*call setup first"):
        Parts().train_dataloader()
    with pytest.raises(AttributeError, match=r"Parts.prepare_data sets: .* in one process per node, so set it in"):
        _ = Parts().raw
    assert not hasattr(Parts(), "other")
    data, trainer = Parts(), quiet(max_epochs=1)
    with warns("Parts.valid_dataloader is not called, and without a val_dataloader nothing is validated"):
        trainer.fit(Regression(), datamodule=data)
    with pytest.raises(AttributeError, match="has set; set it in setup for this stage"):
        trainer.test(Evaluated(), datamodule=data)


def test_a_tensor_is_no_loader() -> None:
    with raises(DataError, "A tensor of shape (4, 2) is not a loader", "DataLoader(TensorDataset(tensor)"):
        quiet(max_epochs=1).fit(Regression(), torch.zeros(4, 2))


@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_data_that_workers_cannot_get_are_named() -> None:
    data = DataLoader(samples(), 2, num_workers=1, multiprocessing_context="spawn", collate_fn=lambda batch: batch)
    with pytest.raises(Exception, match="pickle") as info:
        quiet(max_epochs=1).fit(Regression(), data)
    assert any("define those at the top of a module, or set num_workers=0" in note for note in info.value.__notes__)


# --- callbacks and settings ---


@pytest.mark.parametrize("make", [EarlyStopping, lambda name, **o: ModelCheckpoint(monitor=name, **o)])
def test_the_default_mode_for_an_accuracy_is_pointed_out(make: Any) -> None:
    with warns("(monitor='val/acc') takes the smallest value for the best"):
        assert make("val/acc").mode == "min"
    for name, options in (("val_acc", {"mode": "min"}), ("dice_loss", {}), ("accumulated", {}), ("acc_error", {})):
        make(name, **options)


def test_callbacks_that_never_act_are_pointed_out() -> None:
    with warns("StochasticWeightAveraging(swa_epoch_start=4) averages nothing in max_epochs=3"):
        fit(Regression(), callbacks=StochasticWeightAveraging(0.1, swa_epoch_start=4))
    fit(Regression(), callbacks=StochasticWeightAveraging(0.1, swa_epoch_start=3))


def test_a_writer_is_checked_before_anything_is_predicted() -> None:
    class Writes(BasePredictionWriter):
        def write_on_batch_end(self, *args: Any) -> None:
            raise AssertionError

    with pytest.raises(NotImplementedError, match="does not override write_on_epoch_end"):
        quiet(callbacks=Writes("batch_and_epoch")).predict(Regression(), loader())


def test_frozen_batch_norms_stay_as_they_are(caplog: Any) -> None:
    class Normed(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(nn.BatchNorm1d(2))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.net(self.backbone(x))
            return out

        def configure_optimizers(self) -> Any:
            return SGD(self.net.parameters(), lr=0.1)

    normed: Any = Normed()
    fit(normed, callbacks=BackboneFinetuning(2, train_bn=False), limit_train_batches=2, max_epochs=3, max_steps=2)
    assert normed.backbone[0].running_mean.tolist() == [0, 0]
    assert "batch" not in caplog.text
    normed = Normed()
    normed.backbone.requires_grad_(False)
    with caplog.at_level("INFO"):
        fit(normed)
    assert "The parameters of backbone.0 are frozen, but the running statistics follow" in caplog.text


class Tells(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", 1.0)


def test_settings_that_may_be_meant_otherwise_are_told(tmp_path: Path, caplog: Any) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=100)
    with caplog.at_level("INFO"):
        fit(Regression())
        assert "1.0" not in caplog.text
        fit(Regression(), limit_train_batches=1, check_val_every_n_epoch=4, enable_checkpointing=True, callbacks=saver)
        fit(Regression(), val_check_interval=1)
        fit(Tells(), enable_checkpointing=True, callbacks=ModelCheckpoint(tmp_path, monitor="val_loss", mode="max"))
    for text in (
        "limit_train_batches=1 trains on 1 batch of each epoch; 1.0 is all of them",
        "No epoch is validated: check_val_every_n_epoch=4 is above max_epochs=3",
        "ModelCheckpoint(every_n_train_steps=100) saves no checkpoint in the 3 steps of this fit",
        "val_check_interval=1 validates after each batch; 1.0 is once an epoch",
        "ModelCheckpoint(monitor='val_loss', mode='max') keeps the largest loss",
    ):
        assert text in caplog.text
    with raises(ConfigError, "nothing was logged under this name", "This fit validates nothing"):
        fit(Regression(), limit_val_batches=0, callbacks=EarlyStopping("val_loss"))
    with raises(ConfigError, "Trainer.fit has no argument 'train_dataloader'", "Did you mean 'train_dataloaders'?"):
        quiet().fit(Regression(), train_dataloader=loader())


def test_a_callback_of_lightning_in_a_config_is_named_here(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "config.yaml"
    name = "pytorch_lightning.callbacks.LearningRateLogger"
    path.write_text(f"module: {{_target_: small.Regression}}\ntrainer: {{callbacks: [{{_target_: {name}}}]}}\n")
    assert main(["fit", str(path)]) == 2
    assert "write echelon.LearningRateMonitor, or" in capsys.readouterr().err
