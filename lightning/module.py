"""LightningModule and LightningDataModule: the bases of modules written for Lightning, which also load its files."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, Self

import torch

from ..trainer.module.data_module import DataModule
from ..trainer.module.load import (
    MapLocation,
    classmethod_only,
    datamodule_from,
    load_datamodule,
    load_module,
    module_from,
)
from ..trainer.module.optimizers import ManagedOptimizer
from ..trainer.module.train_module import TrainModule
from .checkpoint_files import Source, hyper_parameters, is_own_path, read_checkpoint
from .extras.rank_zero import LightningDeprecationWarning
from .in_fabric import InFabric
from .kept_out import give_back, keep_out


class LightningModule(InFabric):
    """A `TrainModule` that may add objects to a checkpoint: those that it cannot hold are left out, with a warning.

    Lightning pickles them. Here `on_load_checkpoint` gets what the module, built again from its hyper-parameters, would
    save in their place.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        for name, around in (("on_save_checkpoint", _wrap_saving), ("on_load_checkpoint", _wrap_loading)):
            hook = getattr(cls, name)
            if not hasattr(hook, "__wrapped__"):  # also a mixin's, which is not a LightningModule
                setattr(cls, name, around(hook))

    @classmethod_only
    def load_from_checkpoint(
        cls,  # noqa: N805 - ruff does not know the decorator
        checkpoint_path: Source,
        map_location: MapLocation = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Do what `TrainModule.load_from_checkpoint` does, also with an open file and with one of Lightning's.

        Of such a file, tensors, plain values and references to classes are read.
        """
        built: Self = load_from_checkpoint(cls, checkpoint_path, map_location, hparams_file, strict, **kwargs)
        return built

    def attach_optimizers(self, optimizers: Sequence[ManagedOptimizer], backward: Callable[..., None]) -> None:
        """Set what `optimizers` returns, each with ``toggle_model``, and what `manual_backward` calls."""
        super().attach_optimizers(optimizers, backward)
        for optimizer in optimizers:
            optimizer.toggle_model = partial(self._toggled_model, optimizer)  # type: ignore[attr-defined]

    @contextmanager
    def _toggled_model(self, optimizer: ManagedOptimizer, sync_grad: bool = True) -> Iterator[None]:
        """Let only the parameters of an optimizer require gradients, inside a ``with`` block.

        Args:
            optimizer: the optimizer.
            sync_grad: accepted for Lightning; the average over ranks is the same either way.
        """
        with self.toggled_optimizer(optimizer):
            yield

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add to a checkpoint, or change what is in it; objects that it cannot hold are left out afterwards."""
        keep_out(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read what `on_save_checkpoint` has added."""

    def to_torchscript(self, *args: Any, **kwargs: Any) -> torch.jit.ScriptModule:
        """Return ``forward`` as TorchScript, as `TrainModule.to_torchscript` does; Lightning 2.8 does not have this."""
        warnings.warn(
            "LightningModule.to_torchscript has been deprecated in v2.7 and will be removed in v2.8 of Lightning; call "
            "to_exported_program() for torch.export, or to_onnx().",
            LightningDeprecationWarning,
            stacklevel=2,
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "TorchScript is deprecated", DeprecationWarning)
            return super().to_torchscript(*args, **kwargs)


class LightningDataModule(DataModule):
    """A `DataModule` under Lightning's name, which also loads from an open file and from one of Lightning's."""

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: Source,
        map_location: MapLocation = None,
        hparams_file: str | Path | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Do what `DataModule.load_from_checkpoint` does, also with an open file and with one of Lightning's."""
        built: Self = load_from_checkpoint(cls, checkpoint_path, map_location, hparams_file, **kwargs)
        return built


def load_from_checkpoint(
    cls: type[Any],
    checkpoint_path: Source,
    map_location: MapLocation = None,
    hparams_file: str | Path | None = None,
    strict: bool | None = None,
    weights_only: bool | None = None,
    **kwargs: object,
) -> Any:
    """Build a module or a data module from a checkpoint; the arguments are those of its own method.

    Raises:
        CheckpointError: if the checkpoint is missing or damaged, or does not fit.
    """
    is_module = issubclass(cls, TrainModule)
    if not is_own_path(checkpoint_path):
        if is_module:
            state = read_checkpoint(checkpoint_path)
            return module_from(cls, state, map_location, hparams_file, strict, kwargs, hyper_parameters)
        state = read_checkpoint(checkpoint_path, "datamodule_")
        loaded = datamodule_from(cls, state, hparams_file, kwargs, hyper_parameters)
        own = state.get("datamodule") or state.get(cls.__qualname__)
    elif is_module:
        return load_module(cls, checkpoint_path, map_location, hparams_file, strict, kwargs)
    else:
        loaded, own = load_datamodule(cls, checkpoint_path, hparams_file, kwargs)
    if own:
        loaded.load_state_dict(own)
    return loaded


Hook = Callable[[Any, dict[str, Any]], None]


def _wrap_saving(hook: Hook) -> Hook:
    @wraps(hook)
    def on_save_checkpoint(self: Any, checkpoint: dict[str, object]) -> None:
        hook(self, checkpoint)
        keep_out(checkpoint)

    return on_save_checkpoint


def _wrap_loading(hook: Hook) -> Hook:
    @wraps(hook)
    def on_load_checkpoint(self: Any, checkpoint: dict[str, object]) -> None:
        saved = type(self).on_save_checkpoint.__wrapped__
        give_back(checkpoint, lambda state: saved(self, state))
        hook(self, checkpoint)

    return on_load_checkpoint
