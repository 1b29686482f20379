"""A tour of mistakes in a Trainer's arguments, callbacks and loggers. Each is answered within 15 seconds."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from small import Regression, loader, quiet
from torch import nn
from tour import Mistake, Tour

from echelon import (
    Callback,
    ConfigError,
    CSVLogger,
    DataModule,
    DDPStrategy,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ModuleError,
    RunError,
    Timer,
    TQDMProgressBar,
    Trainer,
)

tour = Tour()


class Validated(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))


def fit(**settings: Any) -> None:
    quiet(**{"max_epochs": 1, **settings}).fit(Validated(), loader(), loader())


# --- how long, how much ---


@tour.answered_by(ConfigError, "min_epochs=5", "max_epochs=3", "drop min_epochs")
def min_epochs_above_max_epochs() -> None:
    Trainer(min_epochs=5, max_epochs=3)


@tour.answered_by(ConfigError, "min_steps=50", "max_steps=10", "drop min_steps")
def min_steps_above_max_steps() -> None:
    Trainer(min_steps=50, max_steps=10)


@tour.answered_by(ConfigError, "max_epochs='3'", "wrong type str", "int")
def epochs_as_a_string() -> None:
    Trainer(max_epochs="3")  # type: ignore[arg-type]


@tour.answered_by(ConfigError, "max_time", "DD:HH:MM:SS, got '1 hour'")
def a_time_in_words() -> None:
    Trainer(max_time="1 hour")


@tour.answered_by(ConfigError, "max_epoch", "3", "Did you mean 'max_epochs'?")
def a_misspelt_argument() -> None:
    Trainer(max_epoch=3)  # type: ignore[call-arg]


@tour.answered_by(ConfigError, "'gpus' (given as 1)", "Lightning 1's", "accelerator='gpu' and devices=")
def an_argument_of_lightning_1() -> None:
    Trainer(gpus=1)  # type: ignore[call-arg]


@tour.answered_by(ConfigError, "'resume_from_checkpoint' (given as 'x.ckpt')", "fit(..., ckpt_path=)")
def a_checkpoint_for_the_trainer() -> None:
    Trainer(resume_from_checkpoint="x.ckpt")  # type: ignore[call-arg]


@tour.answered_by(ConfigError, "keyword arguments only", "write Trainer(max_epochs=3)")
def arguments_by_position() -> None:
    Trainer("ddp")  # type: ignore[misc]


@tour.answered_by(ConfigError, "fast_dev_run='yes'", "wrong type str", "bool")
def a_fast_dev_run_in_words() -> None:
    Trainer(fast_dev_run="yes")  # type: ignore[arg-type]


@tour.answered_by(ConfigError, "limit_train_batches=0.1 of 4 batches", "at least 0.25")
def a_fraction_of_no_batch() -> None:
    fit(limit_train_batches=0.1)


@tour.answered_by(ConfigError, "val_check_interval=100", "training batches, 4", "check_val_every_n_epoch=None")
def a_validation_that_never_comes() -> None:
    fit(val_check_interval=100)


@tour.answered_by(ConfigError, "accumulate_grad_batches must be >= 1, got 0")
def accumulation_over_no_batch() -> None:
    Trainer(accumulate_grad_batches=0)


@tour.answered_by(ConfigError, "gradient_clip_algorithm='l2'", "'norm' or 'value'")
def an_unknown_way_of_clipping() -> None:
    Trainer(gradient_clip_algorithm="l2")  # type: ignore[arg-type]


class Manual(Validated):
    automatic_optimization = False


@tour.answered_by(ConfigError, "gradient_clip_val=1.0", "Manual.automatic_optimization is False", "training_step")
def clipping_in_manual_optimization() -> None:
    quiet(gradient_clip_val=1.0).fit(Manual(), loader())


@tour.answered_by(ConfigError, "accumulate_grad_batches=2", "Manual.automatic_optimization is False", "training_step")
def accumulation_in_manual_optimization() -> None:
    quiet(accumulate_grad_batches=2).fit(Manual(), loader())


@tour.answered_by(ConfigError, "global_batch_size=8", "accumulate_grad_batches=2", "give one of them")
def a_global_batch_and_accumulation() -> None:
    Trainer(global_batch_size=8, accumulate_grad_batches=2)


# --- where ---


@tour.answered_by(ConfigError, "strategy='fdsp' is not a known strategy", "Did you mean 'fsdp'?")
def a_misspelt_strategy() -> None:
    Trainer(strategy="fdsp")


@tour.answered_by(ConfigError, "got the class DDPStrategy", "DDPStrategy()")
def a_strategy_class() -> None:
    Trainer(strategy=DDPStrategy)  # type: ignore[arg-type]


@tour.answered_by(ConfigError, "'deepspeed_stage_2'", "use 'fsdp'")
def a_strategy_of_lightning() -> None:
    Trainer(strategy="deepspeed_stage_2")


@tour.answered_by(ConfigError, "precision='fp16'", "Did you mean '16-mixed'?")
def a_misspelt_precision() -> None:
    Trainer(precision="fp16")


@tour.answered_by(ConfigError, "accelerator='cudda' is not a known accelerator", "Did you mean 'cuda'")
def an_unknown_accelerator() -> None:
    Trainer(accelerator="cudda")


@tour.answered_by(ConfigError, "accelerator='tpu', but torch finds no such device", "install torch_tpu")
def an_accelerator_without_its_package() -> None:
    Trainer(accelerator="tpu")


if not torch.cuda.is_available():

    @tour.answered_by(ConfigError, "accelerator='gpu'", "accelerator='cpu'")
    def a_gpu_where_there_is_none() -> None:
        Trainer(accelerator="gpu")


@tour.answered_by(ConfigError, "devices must be >= 1, or -1 for all, got 0", "give a number")
def no_device() -> None:
    Trainer(accelerator="cpu", devices=0)


@tour.answered_by(ConfigError, "devices must be >= 1, or -1 for all, got -2", "give a number")
def minus_two_devices() -> None:
    Trainer(accelerator="cpu", devices=-2)


@tour.answered_by(ConfigError, "devices must be a number, 'auto'", "got 'two'")
def devices_in_words() -> None:
    Trainer(accelerator="cpu", devices="two")


@tour.answered_by(ConfigError, "strategy='single'", "devices=2", "such as 'ddp'")
def two_devices_for_one_process() -> None:
    Trainer(strategy="single", accelerator="cpu", devices=2)


@tour.answered_by(ConfigError, "num_nodes=2, but MASTER_ADDR and NODE_RANK are not set", "echelon launch --nnodes 2")
def two_nodes_without_a_launcher() -> None:
    Trainer(strategy="ddp", accelerator="cpu", devices=1, num_nodes=2)


@tour.answered_by(ConfigError, "/proc/nowhere", "cannot be written to", "give another folder")
def a_folder_that_cannot_be_written() -> None:
    quiet(Path("/proc/nowhere"), enable_checkpointing=True).fit(Validated(), loader())


@tour.answered_by(ConfigError, "`profiler`", "got 'slow'", "simple")
def an_unknown_profiler() -> None:
    Trainer(profiler="slow")


@tour.answered_by(ConfigError, "deterministic='maybe'", "'warn'")
def deterministic_perhaps() -> None:
    Trainer(deterministic="maybe")  # type: ignore[arg-type]


# --- callbacks ---


@tour.answered_by(ConfigError, "callbacks holds <class", "such as EarlyStopping(...)")
def a_callback_class() -> None:
    Trainer(callbacks=[EarlyStopping])  # type: ignore[list-item]


@tour.answered_by(ConfigError, "callbacks holds", "function", "instances of echelon.Callback")
def a_function_for_a_callback() -> None:
    Trainer(callbacks=[print])  # type: ignore[list-item]


@tour.answered_by(ConfigError, "state_key", "EarlyStopping", "twice")
def one_callback_twice() -> None:
    fit(callbacks=[EarlyStopping("val_loss"), EarlyStopping("val_loss")])


@tour.answered_by(ConfigError, "at most 1 progress bar, got 2", "remove all but one")
def two_progress_bars() -> None:
    quiet(callbacks=[TQDMProgressBar(), TQDMProgressBar()], enable_progress_bar=True)


@tour.answered_by(ConfigError, "enable_checkpointing=False", "ModelCheckpoint", "drop one")
def a_checkpoint_callback_that_is_switched_off() -> None:
    Trainer(enable_checkpointing=False, callbacks=ModelCheckpoint())


@tour.answered_by(UserWarning, "Misspelt.on_train_epoch_ends", "Did you mean 'on_train_epoch_end'?")
def a_misspelt_hook_of_a_callback() -> None:
    class Misspelt(Callback):
        def on_train_epoch_ends(self, trainer: Any, module: Any) -> None:
            pass

    fit(callbacks=Misspelt())


@tour.answered_by(ConfigError, "got on_train_epoch_end()", "define on_train_epoch_end(self, trainer, module)")
def a_callback_hook_without_its_arguments() -> None:
    class Few(Callback):
        def on_train_epoch_end(self) -> None:  # type: ignore[override]
            pass

    fit(callbacks=Few())


@tour.answered_by(ConfigError, "EarlyStopping(monitor='val_los')", "'val_loss'")
def a_misspelt_metric_of_early_stopping() -> None:
    fit(callbacks=EarlyStopping("val_los"))


@tour.answered_by(ConfigError, "ModelCheckpoint(monitor='val_los')", "'val_loss'")
def a_misspelt_metric_of_the_checkpoint() -> None:
    fit(callbacks=ModelCheckpoint("runs", monitor="val_los"), enable_checkpointing=True)


@tour.answered_by(ConfigError, "EarlyStopping: `mode` can be 'min' or 'max'", "got lowest")
def an_unknown_mode() -> None:
    EarlyStopping("val_loss", mode="lowest")  # type: ignore[arg-type]


@tour.answered_by(ConfigError, "save_top_k=3", "monitor")
def the_best_three_of_no_metric() -> None:
    ModelCheckpoint("runs", save_top_k=3)


@tour.answered_by(ConfigError, "every_n_train_steps=10, every_n_epochs=1 is not possible", "its own ModelCheckpoint")
def two_schedules_of_one_checkpoint() -> None:
    ModelCheckpoint("runs", every_n_epochs=1, every_n_train_steps=10)


@tour.answered_by(ConfigError, "ModelCheckpoint", "twice")
def two_checkpoints_into_one_folder() -> None:
    both = [ModelCheckpoint("runs", monitor="val_loss"), ModelCheckpoint("runs", monitor="val_loss")]
    fit(callbacks=both, enable_checkpointing=True)


@tour.answered_by(ConfigError, "duration", "DD:HH:MM:SS, got 'a day'")
def a_timer_in_words() -> None:
    Timer("a day")


# --- loggers ---


@tour.answered_by(ConfigError, "logger='tensorbord'", "Did you mean 'tensorboard'?")
def a_misspelt_logger() -> None:
    Trainer(logger="tensorbord")


@tour.answered_by(ConfigError, "got the class CSVLogger", "write logger=CSVLogger(...)")
def a_logger_class() -> None:
    Trainer(logger=CSVLogger)  # type: ignore[arg-type]


@tour.answered_by(ConfigError, "a Lacking without name, version, log_hyperparams", "define these")
def a_logger_that_lacks_a_method() -> None:
    class Lacking:
        def log_metrics(self, metrics: Any, step: int) -> None:
            pass

    Trainer(logger=Lacking())  # type: ignore[arg-type]


@tour.answered_by(ConfigError, "a Logger without version, log_metrics", "define these")
def a_logger_of_python() -> None:
    Trainer(logger=logging.getLogger("x"))  # type: ignore[arg-type]


@tour.answered_by(ConfigError, "save_dir='s4://bucket/logs' has the scheme 's4'", "s3")
def logs_in_a_store_that_nobody_knows() -> None:
    CSVLogger("s4://bucket/logs")


@tour.answered_by(ConfigError, "LearningRateMonitor cannot be used", "no logger", "logger=False", "remove the callback")
def learning_rates_without_a_logger() -> None:
    fit(callbacks=LearningRateMonitor())


@tour.answered_by(ConfigError, "Two loggers of type CSVLogger", "different names or versions")
def two_loggers_into_one_folder() -> None:
    Trainer(logger=[CSVLogger("logs", name="a", version=0), CSVLogger("logs", name="a", version=0)])


# --- calls ---


@tour.answered_by(ConfigError, "Trainer.fit got a Linear", "derive its class from echelon.TrainModule")
def a_plain_torch_module() -> None:
    quiet().fit(nn.Linear(2, 1), loader())  # type: ignore[arg-type]


@tour.answered_by(ConfigError, "<class 'small.Regression'>", "such as Regression()")
def a_module_class() -> None:
    quiet().fit(Regression, loader())  # type: ignore[arg-type]


@tour.answered_by(ConfigError, "Trainer.fit got a DataLoader", "pass a TrainModule")
def the_data_before_the_module() -> None:
    quiet().fit(loader(), Regression())  # type: ignore[arg-type]


@tour.answered_by(ConfigError, "datamodule=", "is a DataLoader", "or pass loaders")
def a_loader_as_a_data_module() -> None:
    quiet().fit(Regression(), datamodule=loader())  # type: ignore[arg-type]


@tour.answered_by(ConfigError, "is a type", "such as Data(), or pass loaders")
def a_data_module_class() -> None:
    class Data(DataModule):
        def train_dataloader(self) -> Any:
            return loader()

    quiet().fit(Regression(), datamodule=Data)  # type: ignore[arg-type]


@tour.answered_by(ModuleError, "No `test_step()` method defined", "trainer.test()")
def a_test_without_its_step() -> None:
    quiet().test(Regression(), loader())


@tour.answered_by(ConfigError, "Trainer.validate was called with model=None", "pass the module")
def a_validation_without_a_module() -> None:
    quiet().validate()


@tour.answered_by(RunError, "Trainer.fit was called while fit runs", "use another Trainer")
def a_fit_inside_a_fit() -> None:
    class Nested(Regression):
        def on_train_start(self) -> None:
            self.trainer.fit(self, loader())

    quiet(max_epochs=1).fit(Nested(), loader())


@tour.answered_by(RunError, "must be a run, found None", "call fit")
def the_number_of_steps_before_a_run() -> None:
    _ = quiet().estimated_stepping_batches


@pytest.mark.timeout(60)
@tour.cases
def test_a_mistake_in_settings_is_answered(mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mistake.check()
