"""LightningModule and LightningDataModule: the bases of modules written for Lightning."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from ..trainer.module.data_module import DataModule
from ..trainer.module.train_module import TrainModule
from .kept_out import give_back, keep_out


class LightningModule(TrainModule):
    """A `TrainModule` that may add objects to a checkpoint: those that it cannot hold are left out, with a warning.

    Lightning pickles them. Here `on_load_checkpoint` gets what the module, built again from its hyper-parameters, would
    save in their place.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, around in (("on_save_checkpoint", _saving), ("on_load_checkpoint", _loading)):
            hook = getattr(cls, name)
            if not hasattr(hook, "__wrapped__"):  # also a mixin's, which is not a LightningModule
                setattr(cls, name, around(hook))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add to a checkpoint, or change what is in it; objects that it cannot hold are left out afterwards."""
        keep_out(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read what `on_save_checkpoint` has added."""


class LightningDataModule(DataModule):
    """A `DataModule` under Lightning's name."""


Hook = Callable[[Any, dict[str, Any]], None]


def _saving(hook: Hook) -> Hook:
    @wraps(hook)
    def on_save_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
        hook(self, checkpoint)
        keep_out(checkpoint)

    return on_save_checkpoint


def _loading(hook: Hook) -> Hook:
    @wraps(hook)
    def on_load_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
        saved = type(self).on_save_checkpoint.__wrapped__
        give_back(checkpoint, lambda state: saved(self, state))
        hook(self, checkpoint)

    return on_load_checkpoint
