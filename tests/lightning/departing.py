"""Programs that behave differently with Echelon than with Lightning, one per row of lightning/departures.py.

Each is given a framework's module as `pl`, shows in its lines what `echelon port` looks for, and returns what it has
observed. `SHOWS` says which rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from beside import data, net, trainer

Observed = dict[str, Any]

SHOWS: dict[str, tuple[str, ...]] = {}
"""The rows that a program shows, by its name."""

SILENT: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


def shows(*rows: str) -> Callable[[Any], Any]:
    """Note which rows a program shows."""

    def note(program: Any) -> Any:
        SHOWS[program.__name__] = rows
        return program

    return note


def outcome(call: Callable[[], Any]) -> str:
    """Return that a call was taken, or how it was refused."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - of a class of each framework's own
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0].partition(',')[0]:.45}"
    return "taken"


def fitted(pl: Any, *callbacks: Any, module: Any = None, **settings: Any) -> Any:
    """Return a trainer after a fit."""
    own = trainer(pl, callbacks=list(callbacks), **settings)
    own.fit(module or net(pl), data(), data())
    return own


GROUP = "a group"
"""Stands in for a process group."""


# --- files ----------------------------------------------------------------------------------------------------------


class Note:
    """An object that a program puts into a checkpoint."""


@shows("A checkpoint", "torch.load of a checkpoint that is a folder", "save_checkpoint(storage_options=)")
def a_checkpoint_with_an_object(pl: Any) -> Observed:
    def on_save_checkpoint(self: Any, checkpoint: Any) -> None:
        if self.current_epoch == 2:
            checkpoint["note"] = Note()

    own = fitted(pl, module=net(pl, on_save_checkpoint=on_save_checkpoint))
    refusal = outcome(lambda: own.save_checkpoint("object.ckpt"))
    plain = fitted(pl)
    plain.save_checkpoint("plain.ckpt")
    return {
        "object": refusal.partition(":")[0],
        "is a folder": Path("plain.ckpt").is_dir(),
        "torch.load": outcome(lambda: torch.load("plain.ckpt", weights_only=False)).partition(":")[0],
        "storage_options": outcome(lambda: plain.save_checkpoint("other.ckpt", storage_options={})),
    }


@shows("The default logger's folder")
def a_run_with_the_default_logger(pl: Any) -> Observed:
    fitted(pl, logger=True)
    return {"is there": Path("lightning_logs", "version_0").is_dir()}


@shows("What on_save_checkpoint sees")
def keys_of_a_checkpoint(pl: Any) -> Observed:
    seen: Observed = {}

    def on_save_checkpoint(self: Any, checkpoint: Any) -> None:
        asked = ("loops", "loop", "data", "pytorch-lightning_version")
        seen.update({key: key in checkpoint for key in asked})

    fitted(pl, module=net(pl, on_save_checkpoint=on_save_checkpoint)).save_checkpoint("a.ckpt")
    return seen


@shows("last.ckpt", "ModelCheckpoint(enable_version_counter=), .file_exists")
def the_last_checkpoint(pl: Any) -> Observed:
    saving = pl.ModelCheckpoint(dirpath="kept", save_last=True)
    own = fitted(pl, saving, enable_checkpointing=True)
    return {
        "is a link": Path("kept", "last.ckpt").is_symlink(),
        "enable_version_counter": outcome(lambda: pl.ModelCheckpoint(enable_version_counter=False)),
        "file_exists": outcome(lambda: saving.file_exists("kept/last.ckpt", own)),
    }


@shows("save_on_exception", "OnExceptionCheckpoint")
def checkpoints_of_an_exception(pl: Any) -> Observed:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 3:
            raise ZeroDivisionError
        return self.loss(batch)

    def fit(callback: Any) -> str:
        own = trainer(pl, strategy="ddp_fork", devices=2, enable_checkpointing=True, callbacks=[callback])
        return outcome(lambda: own.fit(net(pl, training_step=training_step), data(16))).partition(": -- Process")[0]

    saving = pl.ModelCheckpoint(dirpath="saved", save_on_exception=True, every_n_epochs=5)
    return {"ModelCheckpoint": fit(saving), "OnExceptionCheckpoint": fit(pl.OnExceptionCheckpoint("rescued"))}


# --- loggers --------------------------------------------------------------------------------------------------------


@shows("Calls of a logger")
def a_logger_of_ones_own(pl: Any) -> Observed:
    calls = set()

    class Own(pl.CSVLogger):  # type: ignore[misc, name-defined]
        def log_metrics(self, *args: Any, **kwargs: Any) -> None:
            calls.add((len(args), *sorted(kwargs)))

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.log("x", 1.0)
        return self.loss(batch)

    fitted(pl, module=net(pl, training_step=training_step), logger=Own("logs"), log_every_n_steps=1)
    return {"calls": sorted(calls)}


@shows("MLFlowLogger.name", "MLFlowLogger without a tracking_uri")
def an_mlflow_logger(pl: Any) -> Observed:
    return {
        "without a tracking_uri": outcome(lambda: pl.MLFlowLogger("digits", save_dir="runs")).partition(":")[0],
        "name": pl.MLFlowLogger("digits", tracking_uri="sqlite:///given.db").name,
    }


# --- hooks and callbacks --------------------------------------------------------------------------------------------


@shows("ReduceLROnPlateau at an epoch's end")
def a_plateau_and_a_checkpoint(pl: Any) -> Observed:
    steps = []

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}

    def on_save_checkpoint(self: Any, checkpoint: Any) -> None:
        steps.append(checkpoint["lr_schedulers"][0]["last_epoch"])

    module = net(pl, configure_optimizers=configure_optimizers, on_save_checkpoint=on_save_checkpoint)
    saving = pl.ModelCheckpoint(dirpath="kept", save_on_train_epoch_end=True)
    fitted(pl, saving, module=module, enable_checkpointing=True)
    return {"steps": steps}


@shows("self.log(sync_dist_group=)")
def a_group_of_a_metric(pl: Any) -> Observed:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.log("x", 1.0, sync_dist_group=GROUP)
        return self.loss(batch)

    return {"fit": outcome(lambda: fitted(pl, module=net(pl, training_step=training_step)))}


@shows("Timer")
def a_timer_of_a_sanity_check(pl: Any) -> Observed:
    timer = pl.Timer()
    fitted(pl, timer, num_sanity_val_steps=2, check_val_every_n_epoch=5)
    return {"validated": timer.time_elapsed("validate") > 0}


@shows("StochasticWeightAveraging")
def averaged_weights(pl: Any) -> Observed:
    own = fitted(pl, pl.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1), max_epochs=4)
    lists = outcome(lambda: pl.StochasticWeightAveraging(swa_lrs=[0.2, 1]))
    return {"initial_lr": own.optimizers[0].param_groups[0].get("initial_lr"), "lists": lists.partition(":")[0]}


@shows("on_validation_model_eval overridden")
def a_module_that_stays_in_training_mode(pl: Any) -> Observed:
    modes = []

    def on_validation_model_eval(self: Any) -> None:
        modes.append(("hook", self.training))

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        modes.append(("step", self.training))

    module = net(pl, on_validation_model_eval=on_validation_model_eval, validation_step=validation_step)
    trainer(pl, max_epochs=1).fit(module, data(), data(2))
    return {"modes": modes}


@shows("training_step(self, dataloader_iter)")
def a_step_that_draws_its_batches(pl: Any) -> Observed:
    def training_step(self: Any, dataloader_iter: Any) -> Any:
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)

    return {"fit": outcome(lambda: fitted(pl, module=net(pl, training_step=training_step)))}


# --- settings -------------------------------------------------------------------------------------------------------


@shows("min_epochs above max_epochs")
def more_epochs_than_the_most(pl: Any) -> Observed:
    return {"settings": outcome(lambda: pl.Trainer(min_epochs=3, max_epochs=2, **SILENT))}


@shows("accumulate_grad_batches={0: 2}")
def accumulation_by_epoch(pl: Any) -> Observed:
    return {"settings": outcome(lambda: pl.Trainer(accumulate_grad_batches={0: 2}, **SILENT))}


@shows(
    "Trainer(plugins=), CheckpointIO, environment and precision plugins",
    "Trainer(suggest_integrations=), PL_TRAINER_* variables",
    "Trainer(model_registry=)",
)
def settings_that_are_not_there(pl: Any) -> Observed:
    plugin = pl.plugins.TorchCheckpointIO() if hasattr(pl, "plugins") else GROUP
    os.environ["PL_TRAINER_MAX_EPOCHS"] = "7"
    try:
        by_variable = pl.Trainer(**SILENT).max_epochs
    finally:
        del os.environ["PL_TRAINER_MAX_EPOCHS"]
    return {
        "PL_TRAINER_MAX_EPOCHS": by_variable,
        "plugins": outcome(lambda: pl.Trainer(plugins=[plugin], **SILENT)),
        "suggest_integrations": outcome(lambda: pl.Trainer(suggest_integrations=False, **SILENT)),
        "model_registry": outcome(lambda: pl.Trainer(model_registry="digits", **SILENT)),
    }


@shows(
    'DeepSpeedStrategy, ModelParallelStrategy, "xla", "horovod"',
    'precision="transformer-engine"',
)
def names_of_strategies_and_precisions(pl: Any) -> Observed:
    return {
        "deepspeed": outcome(lambda: pl.Trainer(strategy="deepspeed", **SILENT)),
        "horovod": outcome(lambda: pl.Trainer(strategy="horovod", **SILENT)),
        "transformer-engine": outcome(lambda: pl.Trainer(precision="transformer-engine", **SILENT)),
    }


# --- what is left of a trainer --------------------------------------------------------------------------------------


@shows("to_tensorrt")
def exports_of_a_module(pl: Any) -> Observed:
    module = net(pl)
    return {"to_tensorrt": outcome(lambda: module.to_tensorrt("a.ts", torch.ones(1, 2))).partition(":")[0]}


@shows("LearningRateFinder")
def a_rate_for_two_groups(pl: Any) -> Observed:
    def groups(self: Any) -> Any:
        bias = {"params": [self.net.bias], "lr": self.lr / 10}
        return torch.optim.SGD([{"params": [self.net.weight], "lr": self.lr}, bias], lr=self.lr)

    module = net(pl, configure_optimizers=groups)
    module.lr = 0.01
    finder = pl.LearningRateFinder(num_training_steps=40)
    own = trainer(pl, callbacks=[finder], max_epochs=1)
    own.fit(module, data(100), data())
    first, second = (group["lr"] for group in own.optimizers[0].param_groups)
    return {"ratio": round(first / second)}


@shows("BatchSizeFinder")
def a_batch_size_that_is_found(pl: Any) -> Observed:
    module = net(pl, train_dataloader=lambda self: data(batch_size=self.batch_size))
    module.batch_size = 2
    own = trainer(pl, callbacks=[pl.BatchSizeFinder(max_trials=1, init_val=4)], max_epochs=1)
    own.fit(module, val_dataloaders=data())
    return {"steps": own.global_step}


@shows(
    "module.fabric, trainer.fit_loop, val_check_batch, precision_plugin, strategy.checkpoint_io, .lightning_module, "
    ".model, .parallel_devices, .num_processes"
)
def insides_of_a_trainer(pl: Any) -> Observed:
    own = fitted(pl)
    return {
        "fit_loop": outcome(lambda: own.fit_loop).partition(":")[0],
        "val_check_batch": outcome(lambda: own.val_check_batch).partition(":")[0],
        "precision_plugin": outcome(lambda: own.precision_plugin).partition(":")[0],
        "checkpoint_io": outcome(lambda: own.strategy.checkpoint_io).partition(":")[0],
    }
