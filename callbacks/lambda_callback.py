"""LambdaCallback: make a callback from plain functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..common.errors import ConfigError, did_you_mean
from .callback import Callback
from .dispatch import HOOK_NAMES


class LambdaCallback(Callback):
    """Call the given functions as hooks: ``LambdaCallback(on_train_start=lambda trainer, module: ...)``.

    Each is called when `Callback` documents, on every rank, with the arguments of its hook.

    Args:
        hooks: functions by hook name; None for no function.

    Raises:
        ConfigError: for a name that is not a hook, or a value that cannot be called.

    Example::

        told = LambdaCallback(on_train_epoch_end=lambda trainer, module: print(trainer.current_epoch))
        Trainer(max_epochs=1, callbacks=told).fit(module, train_loader)
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        for name, function in hooks.items():
            if name not in HOOK_NAMES:
                raise ConfigError(f"LambdaCallback: {name!r} is not a hook.{did_you_mean(name, HOOK_NAMES)}")
            if function is None:
                continue
            if not callable(function):
                raise ConfigError(f"{name} must be a function of the hook's arguments, got {function!r}.")
            setattr(self, name, function)
