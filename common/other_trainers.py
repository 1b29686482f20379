"""Other trainers: the names that their users know arguments and methods by, and what to write for them here."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

WITHOUT_COUNTERPART: Final[Mapping[str, str]] = {
    "plugins": (
        "name the precision in precision=, pass strategy= an object such as DDPStrategy(), and leave the launcher's "
        "settings to be detected; checkpoints have one format (docs/checkpoint-format.md)"
    ),
    "model_registry": "upload the checkpoint in a callback's on_fit_end",
}
"""Arguments of Lightning's Trainer that have no counterpart, and what to do instead."""

OF_LIGHTNING_1: Final[Mapping[str, str]] = {
    **dict.fromkeys(("gpus", "num_gpus", "auto_select_gpus"), "accelerator='gpu' and devices=, the number of them"),
    **dict.fromkeys(("tpu_cores", "ipus"), "accelerator='auto': CPUs, CUDA and MPS are supported"),
    "num_processes": "devices=",
    "distributed_backend": "strategy=",
    **dict.fromkeys(("amp_backend", "amp_level"), "precision='bf16-mixed' or '16-mixed'"),
    "resume_from_checkpoint": "fit(..., ckpt_path=)",
    "checkpoint_callback": "enable_checkpointing=, or a ModelCheckpoint in callbacks=",
    "weights_save_path": "default_root_dir=, or ModelCheckpoint(dirpath=)",
    **dict.fromkeys(("progress_bar_refresh_rate", "process_position"), "TQDMProgressBar(refresh_rate=) in callbacks="),
    **dict.fromkeys(("weights_summary",), "enable_model_summary=, or ModelSummary(max_depth=) in callbacks="),
    **dict.fromkeys(
        ("auto_lr_find", "auto_scale_batch_size"), "LearningRateFinder() or BatchSizeFinder() in callbacks="
    ),
    "stochastic_weight_avg": "StochasticWeightAveraging() in callbacks=",
    "terminate_on_nan": "NaNGuard() in callbacks=",
    "track_grad_norm": "self.log with torch.nn.utils.get_total_norm in on_before_optimizer_step",
    "log_gpu_memory": "DeviceStatsMonitor() in callbacks=",
    "reload_dataloaders_every_epoch": "reload_dataloaders_every_n_epochs=1",
    "replace_sampler_ddp": "use_distributed_sampler=",
    "flush_logs_every_n_steps": "CSVLogger(flush_logs_every_n_steps=)",
    "multiple_trainloader_mode": "CombinedLoader(loaders, mode=) for train_dataloaders",
    "truncated_bptt_steps": "manual optimization in training_step",
    "prepare_data_per_node": "prepare_data_per_node = False in the module or data module",
    "move_metrics_to_cpu": "nothing: metrics use no device memory",
}
"""Arguments of Lightning 1's Trainer, and their replacements."""

_BATCH_SIZE: Final = "DataLoader(batch_size=), or global_batch_size= for the samples of a step over all processes"
_VALIDATIONS: Final = "check_val_every_n_epoch= or val_check_interval="
_SAVES: Final = "ModelCheckpoint(every_n_train_steps=, every_n_epochs=, save_top_k=) in callbacks="
_MODULE: Final = "configure_optimizers of the module"

ATTRIBUTES_OF_LIGHTNING: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("add_argparse_args", "from_argparse_args", "parse_argparser"),
        "pass the parsed values to Trainer(max_epochs=args.max_epochs), or run `echelon fit config.yaml`",
    ),
    **dict.fromkeys(("lr_find", "tune", "tuner"), "pass LearningRateFinder() or BatchSizeFinder() in callbacks="),
    "scale_batch_size": "pass BatchSizeFinder() in callbacks=",
    "run_evaluation": "call validate()",
    "resume_from_checkpoint": "call fit(..., ckpt_path=)",
    "lightning_module": "use trainer.model",
    "get_model": "use trainer.model",
    "training_type_plugin": "use trainer.strategy",
    "accelerator_connector": "use trainer.strategy",
    "current_step": "use trainer.global_step",
    "total_batch_idx": "use trainer.global_step",
}
"""Attributes of Lightning's Trainer that Echelon's lacks, and what to do instead."""

OF_OTHER_ENGINES: Final[Mapping[str, str]] = {
    "setup_module": "engine.setup(module)",
    "prepare": "engine.setup(module, optimizer), and engine.setup_dataloaders(loader)",
    "prepare_model": "engine.setup(module, optimizer)",
    "prepare_data_loader": "engine.setup_dataloaders(loader)",
    "accumulate": "engine.setup_dataloaders(loader, accumulate_grad_batches=), or engine.no_backward_sync",
    **dict.fromkeys(("clip_grad_norm_", "clip_grad_value_"), "engine.clip_gradients"),
    "gather": "engine.all_gather",
    "wait_for_everyone": "engine.barrier()",
    "is_main_process": "engine.is_global_zero",
    "is_local_main_process": "engine.local_rank == 0",
    "process_index": "engine.global_rank",
    "num_processes": "engine.world_size",
    "unwrap_model": "the module itself, which engine.setup does not wrap",
    "save_state": "engine.save(path, state)",
    "load_state": "engine.load(path, state)",
    "log": "a logger, as in CSVLogger('logs').log_metrics(values, step)",
}
"""Attributes of Fabric and Accelerate's Accelerator that an Engine lacks, and what to use instead."""

OF_OTHERS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("num_train_epochs", "num_epochs", "n_epochs", "epochs"), "max_epochs="),
    **dict.fromkeys(("gradient_accumulation_steps", "grad_accum_steps"), "accumulate_grad_batches="),
    **dict.fromkeys(("mixed_precision", "amp", "fp16", "bf16"), "precision='bf16-mixed' or '16-mixed'"),
    "max_grad_norm": "gradient_clip_val=",
    "gradient_checkpointing": "activation_checkpointing='full'",
    "torch_compile": "compile=True",
    **dict.fromkeys(("output_dir", "logging_dir", "log_dir", "project_dir"), "default_root_dir="),
    **dict.fromkeys(("logging_steps", "log_interval"), "log_every_n_steps="),
    **dict.fromkeys(("report_to", "log_with"), "logger="),
    "disable_tqdm": "enable_progress_bar=False",
    **dict.fromkeys(("eval_strategy", "evaluation_strategy", "eval_steps", "eval_interval"), _VALIDATIONS),
    **dict.fromkeys(("save_strategy", "save_steps", "save_total_limit", "save_interval"), _SAVES),
    "load_best_model_at_end": "ModelCheckpoint(monitor=) in callbacks=, and ckpt_path='best' in test()",
    "metric_for_best_model": "ModelCheckpoint(monitor=) in callbacks=",
    **dict.fromkeys(("train_batch_size", "batch_size", "per_device_train_batch_size"), _BATCH_SIZE),
    **dict.fromkeys(("eval_batch_size", "per_device_eval_batch_size"), "DataLoader(batch_size=)"),
    **dict.fromkeys(("learning_rate", "lr", "weight_decay", "optimizer", "optim", "optimizers"), _MODULE),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type", "scheduler", "warmup_steps", "warmup_ratio"), _MODULE),
    "seed": "echelon.seed_everything(seed)",
    "num_workers": "DataLoader(num_workers=)",
    "dataloader_num_workers": "DataLoader(num_workers=)",
    **dict.fromkeys(("fsdp", "deepspeed"), "strategy='fsdp'"),
    "ddp": "strategy='ddp'",
    **dict.fromkeys(("no_cuda", "use_cpu"), "accelerator='cpu'"),
    "device": "accelerator= and devices=",
    **dict.fromkeys(("model", "module"), "fit(module, ...)"),
    **dict.fromkeys(("train_dataset", "eval_dataset", "train_dataloader", "train_dataloaders"), "fit(module, loader)"),
    **dict.fromkeys(("val_dataloader", "val_dataloaders"), "fit(module, loader, val_loader)"),
    "datamodule": "fit(module, datamodule=)",
}
"""Arguments of other trainers, such as Hugging Face's and Accelerate's, and what they are here."""

MARK_OF_FILES: Final[Mapping[str, str]] = {"pytorch-lightning_version": "2.6.6"}
"""What marks a checkpoint as Lightning's: its version, here the one whose names and forms single files have."""
_LARGEST_PICKLE: Final = 1 << 24
"""Bytes of the part of a file that is searched for the name of the program that wrote it."""


def explain_argument(name: str, value: object) -> str | None:
    """Return what to write instead of an argument of another trainer; None if no other has it either."""
    if name in WITHOUT_COUNTERPART:
        return f"{name} must be None, as Echelon has no {name}, got {value!r:.80}; {WITHOUT_COUNTERPART[name]}."
    given = f"Trainer has no argument {name!r} (given as {value!r:.80})"
    if name in OF_LIGHTNING_1:
        return f"{given}, which was Lightning 1's; use {OF_LIGHTNING_1[name]}."
    return f"{given}; use {OF_OTHERS[name]}." if name in OF_OTHERS else None


def is_of_another_trainer(path: Path) -> bool:
    """Return whether a file is a checkpoint of Lightning, without unpickling it."""
    try:
        with zipfile.ZipFile(path) as archive:
            pickled = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
            if pickled is None:
                return False
            with archive.open(pickled) as file:
                content = file.read(_LARGEST_PICKLE)
                return all(mark.encode() in content for mark in MARK_OF_FILES)
    except (OSError, zipfile.BadZipFile, RuntimeError, NotImplementedError, ValueError):
        return False
