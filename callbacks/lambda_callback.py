"""LambdaCallback: hooks from plain functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..strategies.errors import ConfigError, did_you_mean
from .callback import Callback
from .dispatch import HOOK_NAMES


class LambdaCallback(Callback):
    """Calls the given functions as hooks: ``LambdaCallback(on_train_start=lambda trainer, module: ...)``.

    Each hook runs when `Callback` says that it does, with that hook's arguments, on every rank.

    Args:
        hooks: functions by the names of the hooks; None for a name is as if it was not given.

    Raises:
        ConfigError: for a name that no hook has, or something that cannot be called.
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        for name, function in hooks.items():
            if name not in HOOK_NAMES:
                raise ConfigError(f"LambdaCallback: {name!r} is not a hook.{did_you_mean(name, HOOK_NAMES)}")
            if function is None:
                continue
            if not callable(function):
                raise ConfigError(
                    f"LambdaCallback: {name}={function!r} cannot be called; give a function of the hook's arguments."
                )
            setattr(self, name, function)
