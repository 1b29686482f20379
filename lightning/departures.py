"""Table of departures: where a Lightning program behaves differently, and how to recognize it in a line of code.

docs/lightning.md has the same rows, with both behaviors and the reason; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Departure:
    """A row of docs/lightning.md, and the places in a program that it concerns."""

    row: str
    """The first cell of the row, without backquotes."""
    says: str
    """What happens with Echelon, and what to do."""
    methods: tuple[str, ...] = ()
    """Methods that a class of the program defines."""
    calls: tuple[str, ...] = ()
    """Methods that are called, possibly with a keyword argument: ``log`` or ``log(sync_dist_group)``."""
    attributes: tuple[str, ...] = ()
    """Attributes that are read."""
    texts: tuple[str, ...] = ()
    """Substrings of string literals."""
    classes: tuple[str, ...] = ()
    """Classes that are constructed, possibly with a keyword argument, or with a dict as one: ``Timer``,
    ``Trainer(plugins)``, ``Trainer(accumulate_grad_batches={})``. An argument that is None or False does not count."""
    is_missing: bool = False
    """Whether the row is under "No counterpart"."""


DEPARTURES: Final = (
    Departure(
        "A checkpoint",
        "a checkpoint is a folder of safetensors and JSON, or with single_file=True one file for torch.load; objects "
        "of your own classes are refused",
        calls=("save_checkpoint",),
        methods=("on_save_checkpoint",),
    ),
    Departure("The default logger's folder", "the folder is echelon_logs", texts=("lightning_logs",)),
    Departure(
        "Calls of a logger",
        "loggers are called by position: log_metrics(metrics, step), finalize(status)",
        methods=("log_metrics",),
    ),
    Departure(
        "What on_save_checkpoint sees",
        "the state has `loop` and `data` in place of `loops`, and no version of Lightning's",
        methods=("on_save_checkpoint", "on_load_checkpoint"),
        texts=("pytorch-lightning_version",),
    ),
    Departure("last.ckpt", "last.ckpt is a link to the newest checkpoint", classes=("ModelCheckpoint(save_last)",)),
    Departure(
        "save_on_exception",
        "is refused on several processes: the other ranks cannot save with one that failed",
        classes=("ModelCheckpoint(save_on_exception)",),
    ),
    Departure(
        "ReduceLROnPlateau at an epoch's end",
        "steps before the checkpoint of that moment",
        calls=("ReduceLROnPlateau",),
    ),
    Departure("self.log(sync_dist_group=)", "must be None: reduce yourself", calls=("log(sync_dist_group)",)),
    Departure("Timer", "the sanity check is a stage of its own", classes=("Timer",)),
    Departure(
        "StochasticWeightAveraging", "leaves initial_lr of param groups alone", classes=("StochasticWeightAveraging",)
    ),
    Departure(
        "on_validation_model_eval overridden",
        "is called in eval mode, and does not replace .eval()",
        methods=("on_validation_model_eval",),
    ),
    Departure("MLFlowLogger.name", "is the experiment's name, not its id", classes=("MLFlowLogger",)),
    Departure(
        "MLFlowLogger without a tracking_uri",
        "writes a database in save_dir, not files: mlflow ui --backend-store-uri sqlite:///<save_dir>/mlflow.db",
        classes=("MLFlowLogger",),
    ),
    Departure(
        "OnExceptionCheckpoint",
        "is refused on several processes; its checkpoint stays until the next error",
        classes=("OnExceptionCheckpoint",),
    ),
    Departure(
        "LearningRateFinder",
        "further groups keep their ratio, and schedulers follow; its suggestion looks at a fifth of the rates",
        classes=("LearningRateFinder",),
    ),
    Departure(
        "BatchSizeFinder",
        "finds the micro-batch, and the optimizer steps stay the same; searches in fit only",
        classes=("BatchSizeFinder",),
    ),
    Departure("min_epochs above max_epochs", "refused if it is above max_epochs", classes=("Trainer(min_epochs)",)),
    Departure(
        "accumulate_grad_batches={0: 2}",
        "a dict is refused: GradientAccumulationScheduler(scheduling=...) in callbacks",
        classes=("Trainer(accumulate_grad_batches={})",),
    ),
    Departure(
        "Trainer(plugins=), CheckpointIO, environment and precision plugins",
        "leave plugins out: precision=, strategy= and the launcher say the same",
        classes=("Trainer(plugins)",),
        is_missing=True,
    ),
    Departure(
        "Trainer(suggest_integrations=), PL_TRAINER_* variables",
        "drop it; a config has overrides",
        classes=("Trainer(suggest_integrations)",),
        texts=("PL_TRAINER_",),
        is_missing=True,
    ),
    Departure(
        "Trainer(model_registry=)", "upload in on_fit_end", classes=("Trainer(model_registry)",), is_missing=True
    ),
    Departure(
        "ModelCheckpoint(enable_version_counter=), .file_exists",
        "drop it: names are never reused",
        classes=("ModelCheckpoint(enable_version_counter)",),
        calls=("file_exists",),
        is_missing=True,
    ),
    Departure(
        "save_checkpoint(storage_options=)",
        "a local path",
        calls=("save_checkpoint(storage_options)",),
        is_missing=True,
    ),
    Departure(
        'DeepSpeedStrategy, ModelParallelStrategy, "xla", "horovod"',
        'use "fsdp" or "ddp"',
        texts=("deepspeed", "horovod"),
        is_missing=True,
    ),
    Departure(
        "training_step(self, dataloader_iter)",
        "a step gets its batch",
        methods=("training_step(dataloader_iter)",),
        is_missing=True,
    ),
    Departure(
        "to_tensorrt",
        "convert what to_exported_program() or to_onnx() returns",
        calls=("to_tensorrt",),
        is_missing=True,
    ),
    Departure(
        "module.fabric, trainer.fit_loop, val_check_batch, precision_plugin, strategy.checkpoint_io, "
        ".lightning_module, .model, .parallel_devices, .num_processes",
        "use trainer.model, trainer.world_size, trainer.precision",
        attributes=("fit_loop", "val_check_batch", "precision_plugin", "checkpoint_io", "parallel_devices"),
        is_missing=True,
    ),
    Departure(
        "torch.load of a checkpoint that is a folder",
        "if it is a checkpoint of the trainer's: save it with single_file=True, or call echelon.load_weights(path)",
        calls=("torch_load",),
        is_missing=True,
    ),
    Departure(
        'precision="transformer-engine"',
        "bf16-mixed, and convert the layers in configure_model",
        texts=("transformer-engine",),
        is_missing=True,
    ),
)
"""Departures that a line of a program can show."""

OLD_HOOKS: Final = {
    "training_epoch_end": "on_train_epoch_end",
    "validation_epoch_end": "on_validation_epoch_end",
    "test_epoch_end": "on_test_epoch_end",
    "training_step_end": "training_step",
    "validation_step_end": "validation_step",
    "on_epoch_start": "on_train_epoch_start",
    "on_epoch_end": "on_train_epoch_end",
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
}
"""Hooks of Lightning 1, which are refused, and their new names."""

RENAMED_SETTINGS: Final = {
    "Trainer(num_processes)": "devices",
    "Trainer(distributed_backend)": "strategy",
    "Trainer(weights_save_path)": "default_root_dir",
    "Trainer(replace_sampler_ddp)": "use_distributed_sampler",
    "Trainer(checkpoint_callback)": "enable_checkpointing",
    "ModelCheckpoint(period)": "every_n_epochs",
    "ModelCheckpoint(every_n_val_epochs)": "every_n_epochs",
}
"""Arguments with a different name and the same meaning."""

BY_NAME: Final = frozenset(
    {
        "serve.ServableModule",
        "utilities.grad_norm",
        "private names (_AcceleratorConnector), LightningOptimizer, accelerators.*, StrategyRegistry, core.saving",
    }
)
"""Rows whose names names.py has or refuses, besides those that consist only of names."""

UNSEEN: Final = frozenset(
    {
        "MLFlowLogger.log_metrics",
        "When an iterable data set is read",
        "A run of MLFlowLogger or WandbLogger that resumes",
        "Several optimizers in automatic mode",
        "frequency of a scheduler of steps",
        "Schedulers of epochs, with data of unknown length",
        "A closure called again, with accumulate_grad_batches=2",
        "Hooks of evaluation batches without dataloader_idx, several loaders",
        "validation_step(batch, batch_idx, dataloader_idx), one loader",
        "The step axis of loggers",
        "The step value of an accumulation window",
        'save_last="link", save_top_k=0',
        "A run resumed from that checkpoint",
        "fit from the checkpoint of a complete run",
        "Writing a checkpoint",
        "Ctrl-C",
        "save_hyperparameters of a module built in another's __init__",
        "on_step=True in an evaluation, several processes",
        "Loaders",
        "A metric's name with / in filename",
        "Gradients of the last step",
        "Random order",
        "Workers of a loader",
        "The folder of a ModelCheckpoint without dirpath in a second fit",
        "patience of an EarlyStopping that resumes",
        "A data module's state in a checkpoint",
        "A stream that gives no batch in an epoch",
        "sync_dist",
        "The module's argument in Callback's own hooks",
        "log_dict(MetricCollection)",
        "max_time shown as a Timer in trainer.callbacks",
        "RichProgressBar.progress, PyTorchProfiler.function_events",
        "CombinedLoader.reset",
        "fsspec paths",
        "the words of warnings, reprs and tables",
        "callback_metrics of on_step=True in an evaluation",
        "val_check_interval that ends inside an accumulation window",
        "num_val_batches of one CombinedLoader",
        "fast_dev_run with a callback that monitors a name that is never logged",
        "is_last_batch after on_train_batch_start has returned -1",
        "best_model_score of a metric that is NaN",
        "best_k_models without monitor",
        "Methods of Callback and modules, listed by a program",
        "Types of errors",
        "A second fit of a trainer",
        "hparams_file that does not exist",
        "Annotations in inspect.signature",
        "profiler.dirpath after a run",
        "TQDM_MINITERS, and Colab",
        "Hyper-parameters that LightningCLI adds (_instantiator, _class_path)",
        "Order of trainer.callbacks",
        'checkpoint["epoch"] of a checkpoint saved after a fit',
        "CHECKPOINT_NAME_LAST with fields",
        "fast_dev_run with a ModelCheckpoint",
        "Two loggers in one folder",
        "clip_gradients with another limit than the trainer's",
        "self.log of a name that ends in /dataloader_idx_0",
        "len of a CombinedLoader before its iter",
        'A CombinedLoader in mode "sequential" for training',
        "Names that ThroughputMonitor and DeviceStatsMonitor log",
        "DeviceStatsMonitor without a logger",
        "A progress bar where the output is no terminal",
        "return_predictions with processes that are started",
        "Arguments of SummaryWriter, wandb.init and torch's profiler in a config",
        "AdvancedProfiler and PyTorchProfiler outside a run",
        "step of an optimizer's class",
        "A scheduler without step() in manual optimization",
        "What training_step returns in manual optimization",
        "Fabric's module.logger without a logger",
        "limit_val_batches=3, limit_test_batches and limit_predict_batches on several ranks",
    }
)
"""Rows of docs/lightning.md that no line of a program shows by itself."""
