"""Request: the arguments of one fit, validate, test or predict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from torch import nn

from ..callbacks.accumulation import GradientAccumulationScheduler
from ..callbacks.callback import Callback
from ..callbacks.dispatch import overrides_method
from ..common.errors import ConfigError
from ..common.storage import AnyPath, any_path
from ..strategies import Strategy
from ..strategies.module.compiled_calls import compile_calls
from ..strategies.strategy import MicroBatches
from ..strategies.torch_internals.modules import find_uncompiled
from .module.data_module import DataModule
from .module.train_module import TrainModule
from .resume.changed_settings import Winner
from .session.session import Task
from .session.settings import Settings


@dataclass(frozen=True)
class Request:
    """One fit, validate, test or predict; it is sent to the processes that carry it out."""

    task: Task
    module: TrainModule
    datamodule: DataModule | None
    train_loaders: object = None
    evaluation_loaders: object = None
    ckpt_path: str | AnyPath | None = None
    optimizer_settings: Winner = "saved"
    checkpoint: AnyPath | None = None
    """The checkpoint that `ckpt_path` refers to."""
    keeps_predictions: bool = False
    saved_list: Path | None = None
    """The file in which the processes of the run list the checkpoints that they save."""

    def __post_init__(self) -> None:
        if self.datamodule is not None and (self.train_loaders is not None or self.evaluation_loaders is not None):
            raise ConfigError(
                f"Trainer.{self.task} must get loaders or a data module, got both ({type(self.datamodule).__name__}); "
                "pass one of them."
            )
        if self.ckpt_path is not None:
            any_path("ckpt_path", self.ckpt_path)

    def micro_batches(self, callbacks: Sequence[Callback], settings: Settings) -> MicroBatches:
        """Return the number of micro-batches in each full step, where it is known before the data are."""
        if self.task != "fit":
            return "unknown"
        if settings.accumulate_tokens is not None:
            return "vary"
        is_scheduled = any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks)
        # the global batch of a run that is resumed stays as it was, and so may be cut in another way
        is_derived = settings.global_batch_size is not None or self.ckpt_path is not None
        return "unknown" if is_scheduled or is_derived else settings.accumulate_grad_batches

    def parts(self) -> dict[str, object]:
        """Return what the user passed, by argument name."""
        return {
            "module": self.module,
            "datamodule": self.datamodule,
            "train_dataloaders": self.train_loaders,
            "dataloaders" if self.task != "fit" else "val_dataloaders": self.evaluation_loaders,
        }


M = TypeVar("M")


def unwrap_compiled(model: M, strategy: Strategy) -> M:
    """Return the module inside ``torch.compile(module)``, compiled in place; return anything else as it is.

    As with `Settings.compile`, ``forward`` is compiled, or each child if the module has no ``forward``.

    Raises:
        ConfigError: if it would have to be sent to other processes, since compiled code cannot be pickled.
    """
    module = find_uncompiled(model)
    if not isinstance(module, TrainModule):
        return model
    if strategy.launcher.starts_processes:
        raise ConfigError(
            f"model must be a plain module where strategy={strategy.name!r} starts processes, got "
            f"torch.compile({type(module).__name__}); set compile=True, or to a dict of torch.compile's arguments."
        )
    for part in [module] if overrides_method(module, "forward", nn.Module) else module.children():
        compile_calls(part, model.dynamo_ctx)  # type: ignore[attr-defined]  # with the options that it was given
    return module  # type: ignore[return-value]


class _LastRun(Protocol):
    @property
    def module(self) -> TrainModule: ...

    @property
    def datamodule(self) -> DataModule | None: ...


def evaluation_request(
    task: Task,
    module: TrainModule | None,
    loaders: object,
    datamodule: DataModule | None,
    ckpt_path: str | AnyPath | None,
    *,
    last: _LastRun | None,
) -> Request:
    """Return the request of an evaluation, by default with the module and the data module of the last run.

    Raises:
        ConfigError: if there is neither a module nor a last run.
    """
    if isinstance(loaders, DataModule):
        loaders, datamodule = None, loaders
    if module is None:
        if last is None:
            raise ConfigError(f"Trainer.{task} was called with model=None before any fit; pass the module to run.")
        module = last.module
        datamodule = datamodule if datamodule is not None or loaders is not None else last.datamodule
    return Request(task, module, datamodule, evaluation_loaders=loaders, ckpt_path=ckpt_path)
