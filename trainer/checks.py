"""Checks of a module, callbacks and loggers in the caller's process, before anything starts."""

from __future__ import annotations

import difflib
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..callbacks import __name__ as CALLBACKS
from ..callbacks.callback import Callback
from ..callbacks.dispatch import HOOK_NAMES, overrides_method
from ..callbacks.helpers.loggers import refuse_incomplete
from ..callbacks.progress_display import ProgressDisplay
from ..callbacks.run import Logger
from ..common.errors import ConfigError, DataError, ModuleError
from ..common.lazy_names import is_imported
from ..strategies import Hardware, Strategy
from ..strategies.devices.abilities import has_sync_batchnorm
from ..strategies.torch_internals.modules import find_buffer_dict, find_child_dict, find_parameter_dict, was_initialized
from .data.combined_loader import combined_of
from .module.arguments import check_called_methods, check_step_arguments
from .module.data_module import DataHooks, DataModule
from .module.train_module import TrainModule
from .request import Request
from .session.session import Task
from .session.settings import Settings

_REMOVED_OF_TASK: Final[Mapping[Task, Sequence[str]]] = {
    "fit": ("training_epoch_end", "validation_epoch_end"),
    "validate": ("validation_epoch_end",),
    "test": ("test_epoch_end",),
}
_REMOVED: Final = {
    "on_epoch_start": "on_train_epoch_start",
    "on_epoch_end": "on_train_epoch_end",
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
    "training_step_end": "training_step",
    "validation_step_end": "validation_step",
    "test_step_end": "test_step",
    "on_pretrain_routine_start": "on_fit_start",
    "on_pretrain_routine_end": "on_fit_start",
    "on_keyboard_interrupt": "on_exception",
    "on_init_start": "setup",
    "on_init_end": "setup",
    "configure_sharded_model": "configure_model",
    "get_progress_bar_dict": "get_metrics of the progress bar",
    "tbptt_split_batch": "training_step, with manual optimization",
}
"""Hooks of Lightning 1.x, and their replacements."""

_STEPS: Final = {"fit": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}
_STEP_ARGUMENTS: Final = ("batch", "batch_idx", "dataloader_idx")
_STAGES: Final = {"train", "training", "val", "valid", "validation", "test", "predict"}
"""Keys of a dict that holds loaders of several stages."""


def check_module(module: object, datamodule: object, task: Task) -> None:
    """Check that there is a module with the required step.

    Raises:
        ConfigError: if the module is not a TrainModule, or the data module is not a DataModule.
        ModuleError: if it lacks a step or the optimizers.
    """
    if not isinstance(module, TrainModule):
        hint = "derive its class from echelon.TrainModule" if isinstance(module, nn.Module) else "pass a TrainModule"
        if isinstance(module, type):
            hint += f", such as {module.__name__}()"
        raise ConfigError(f"Trainer.{task} got a {type(module).__name__} ({module!r:.60}) to run; {hint}.")
    if datamodule is not None and not isinstance(datamodule, DataModule):
        raise ConfigError(
            f"datamodule={datamodule!r:.60} is a {type(datamodule).__name__}; pass an echelon.DataModule"
            f"{f', such as {datamodule.__name__}()' if isinstance(datamodule, type) else ''}, or pass loaders."
        )
    if not was_initialized(module):
        name = type(module).__name__
        raise ModuleError(f"{name}.__init__ must call super().__init__(), but did not; call it first.")
    _refuse_hidden_methods(module)
    _check_step(module, _STEPS[task], task)
    if task == "fit" and overrides_method(module, "validation_step", TrainModule):
        check_step_arguments(module, "validation_step", _STEP_ARGUMENTS)
    check_called_methods(module, TrainModule)
    if datamodule is not None:
        check_called_methods(datamodule, DataModule)
    if task == "fit" and not overrides_method(module, "configure_optimizers", TrainModule):
        raise ModuleError(
            "No `configure_optimizers()` method defined in "
            f"{type(module).__name__}{_suggest_method(module, 'configure_optimizers')}; "
            "define it to return an optimizer, such as torch.optim.Adam(self.parameters())."
        )
    _refuse_removed(module, task)
    point_out_misspelt(module, TrainModule)
    if task == "fit" and overrides_method(module, "validation_step", TrainModule):
        _point_out_loader(datamodule if isinstance(datamodule, DataModule) else module)


def _refuse_hidden_methods(module: TrainModule) -> None:
    """Refuse attributes under the name of a method: they would hide it, or, where they are layers, it hides them."""
    held = {name: value for name, value in vars(module).items() if value is not None and not callable(value)}
    parts = {**find_child_dict(module), **find_parameter_dict(module), **find_buffer_dict(module)}
    for name, value in [*held.items(), *parts.items()]:
        if callable(getattr(TrainModule, name, None)):
            raise ModuleError(
                f"{type(module).__name__}.{name} is {value!r:.60}, but {name} is a method of every TrainModule; give "
                "the attribute another name."
            )


def refuse_wrapped(module: nn.Module) -> None:
    """Refuse layers that were wrapped for several processes by hand.

    Raises:
        ModuleError: if there is one.
    """
    for name, part in module.named_modules():
        if isinstance(part, DistributedDataParallel):
            raise ModuleError(
                f"{type(module).__name__}.{name} must be a plain module, got a DistributedDataParallel: the strategy "
                f"makes gradients equal on all ranks itself; keep the {type(part.module).__name__} inside it, and "
                "choose Trainer(strategy='ddp')."
            )


def check_loaders(source: object, name: str) -> None:
    """Check that a list or dict holds loaders and not batches, each of which would be read as a loader.

    Raises:
        DataError: if it holds tensors.
    """
    combined = combined_of(source)
    num_tensors = 0 if combined is None else sum(isinstance(leaf, Tensor) for leaf in combined.flattened)
    if num_tensors:
        raise DataError(
            f"{name} must be a loader, or a list or dict of loaders, got a {type(source).__name__} that holds tensors "
            f"({num_tensors}); pass DataLoader(batches, batch_size=None) for ready-made batches."
        )


def _refuse_removed(module: TrainModule, task: Task) -> None:
    for name in _REMOVED_OF_TASK.get(task, ()):
        if callable(getattr(module, name, None)):
            raise ModuleError(
                f"{type(module).__name__}.{name} must be on_{name.replace('training', 'train')}, got a hook of "
                "Lightning 1.x; rename it, keep the outputs of the steps on self, and clear them there."
            )


def check_stages(train: object) -> None:
    """Check that the training loaders are not those of all stages.

    Raises:
        ConfigError: if they are.
    """
    if isinstance(train, Mapping) and len(train) > 1 and _STAGES.issuperset(train):
        raise ConfigError(
            f"train_dataloaders must be for training, got a dict of {sorted(train)}, which would be read side by side "
            f"as one batch; pass fit(module, loaders[{next(iter(train))!r}], val_dataloaders=...)."
        )


def _check_step(module: TrainModule, step: str, task: Task) -> None:
    if overrides_method(module, step, TrainModule):
        check_step_arguments(module, step, _STEP_ARGUMENTS[:2] if task == "fit" else _STEP_ARGUMENTS)
        return
    if task == "predict" and module.predict_step is not None and overrides_method(module, "forward", nn.Module):
        return
    alternative = ", nor forward" if task == "predict" else ""
    raise ModuleError(
        f"No `{step}()` method defined in {type(module).__name__}{alternative}{_suggest_method(module, step)}; "
        f"define {step}(self, batch, batch_idx) to call trainer.{task}()."
    )


def _point_out_loader(owner: DataHooks) -> None:
    """Warn of a method that looks like a misspelt ``val_dataloader``, if there is none."""
    base = DataModule if isinstance(owner, DataModule) else TrainModule
    own = [name for name in _own_methods(owner, base) if name.endswith("loader")]
    near = difflib.get_close_matches("val_dataloader", own, n=1, cutoff=0.85)
    if near and not overrides_method(owner, "val_dataloader", base):
        warnings.warn(
            f"{type(owner).__name__}.{near[0]} is not called, and without a val_dataloader nothing is validated. Did "
            "you mean 'val_dataloader'?",
            stacklevel=2,
        )


def _suggest_method(module: TrainModule, name: str) -> str:
    near = difflib.get_close_matches(name, _own_methods(module, TrainModule), n=1, cutoff=0.6)
    return f" (is {near[0]!r} meant to be it?)" if near else ""


def _own_methods(instance: object, base: type) -> list[str]:
    known = set(dir(base))
    own = [vars(cls) for cls in type(instance).__mro__ if not issubclass(base, cls)]
    return [name for names in own for name, value in names.items() if callable(value) and name not in known]


def point_out_misspelt(instance: object, base: type) -> None:
    """Warn of methods that look like a misspelled hook or step: they would never be called."""
    hooks = [name for name in dir(base) if name in HOOK_NAMES or name.startswith("on_") or name.endswith("_step")]
    for name in _own_methods(instance, base):
        if name in _REMOVED:
            warnings.warn(
                f"{type(instance).__name__}.{name} is a hook of Lightning 1.x and will not be called; use "
                f"{_REMOVED[name]}.",
                stacklevel=2,
            )
            continue
        near = difflib.get_close_matches(name, hooks, n=1, cutoff=0.85)
        if near and not name.startswith("_"):
            warnings.warn(
                f"{type(instance).__name__}.{name} is not a hook and will not be called. Did you mean {near[0]!r}?",
                stacklevel=2,
            )


def check_manual(module: TrainModule, settings: Settings) -> None:
    """Check that no setting asks the trainer for what a module with manual optimization does itself.

    Raises:
        ConfigError: if one does.
    """
    if module.automatic_optimization:
        return
    for name, neutral in (("accumulate_grad_batches", 1), ("gradient_clip_val", None), ("global_batch_size", None)):
        value = getattr(settings, name)
        if value != neutral:
            raise ConfigError(
                f"{name}={value} needs automatic optimization, but {type(module).__name__}.automatic_optimization "
                "is False; do it in training_step, or drop the setting."
            )


def check_sync_batchnorm(settings: Settings, hardware: Hardware) -> None:
    """Check that ``sync_batchnorm``, if set, is possible on these devices.

    Raises:
        ConfigError: on devices other than GPUs.
    """
    if settings.sync_batchnorm and hardware.environment.world_size > 1 and not has_sync_batchnorm(hardware.device_type):
        raise ConfigError(
            "sync_batchnorm=True needs GPUs (torch's SyncBatchNorm runs nowhere else), got "
            f"accelerator={hardware.device_type!r}; use GroupNorm, or set sync_batchnorm=False."
        )


def check_loggers(loggers: Sequence[Logger]) -> None:
    """Check that each is a logger, and that no two write to the same folder.

    Raises:
        ConfigError: for one that lacks a method, if two write to the same folder, and without a current folder.
    """
    check_current_folder()
    seen: dict[tuple[type, str], Logger] = {}
    for logger in loggers:
        refuse_incomplete(logger)
        log_dir = getattr(logger, "place", None) or getattr(logger, "log_dir", None)
        if not isinstance(log_dir, str | Path):
            continue
        key = (type(logger), os.path.abspath(log_dir))
        if key in seen:
            raise ConfigError(
                f"Two loggers of type {type(logger).__name__} write to {str(log_dir)!r}; "
                "give them different names or versions."
            )
        seen[key] = logger


def check_callbacks(callbacks: Sequence[object]) -> None:
    """Check that callbacks are callbacks, and warn of their misspelled hooks.

    Raises:
        ConfigError: for an object that is not a callback, or for two progress bars.
    """
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"callbacks holds {callback!r:.80}, a {type(callback).__name__}; pass instances of echelon.Callback"
                f"{f', such as {callback.__name__}(...)' if isinstance(callback, type) else ''}."
            )
        point_out_misspelt(callback, Callback)
    num_bars = sum(isinstance(callback, ProgressDisplay) for callback in callbacks)
    if num_bars > 1:
        raise ConfigError(
            f"You added multiple progress bar callbacks, but a run shows at most 1 progress bar, got {num_bars}; "
            "remove all but one."
        )


def check_callbacks_of_fit(
    callbacks: Sequence[Callback], request: Request, settings: Settings, strategy: Strategy, hardware: Hardware
) -> None:
    """Check that each callback can be part of a fit with this strategy on these devices.

    The attribute that a finder sets must exist, and nothing else may set it.

    Raises:
        ConfigError: by a callback that cannot, or for a setting or another callback that it cannot be combined with.
        ModuleError: if the module lacks what a finder sets.
    """
    world_size = hardware.environment.world_size
    for callback in callbacks:
        callback.check_strategy(strategy, world_size, 1 if world_size > 1 else len(hardware.devices))
    if is_imported(f"{CALLBACKS}.finders") and not settings.fast_dev_run:
        from .tuning.finder_checks import check_finders

        check_finders(callbacks, request.module, request.datamodule, settings, strategy)


def check_current_folder() -> None:
    """Check that the current folder exists: relative paths, torch's compiler and new processes begin from it.

    Raises:
        ConfigError: if it was deleted.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(
            f"The current folder must exist, but it was deleted ({error.strerror}); change to another folder (cd, or "
            "os.chdir) before the run."
        ) from None


def check_writable(folder: Path) -> None:
    """Check that files can be created in a folder, creating it if necessary.

    Raises:
        ConfigError: if they cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"default_root_dir={str(folder)!r} cannot be written to ({error.strerror}); give another folder, "
            "or set logger=False and enable_checkpointing=False."
        ) from error
