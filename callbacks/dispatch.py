"""Per hook, only those who override it; resolved once per run, not per step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from torch import nn

from ..strategies.errors import CheckpointError, ConfigError, did_you_mean
from .callback import Callback
from .run import Run

_NOT_HOOKS: Final = {"state_key", "state_dict", "load_state_dict"}
HOOK_NAMES: Final = tuple(name for name in vars(Callback) if not name.startswith("_") and name not in _NOT_HOOKS)


class Hooks:
    """The hooks of one run: for each, an attribute with the callables to call, callbacks first, the module last.

    The callables of callbacks already hold the trainer and the module: all of one name take the same arguments.
    """

    __slots__ = HOOK_NAMES

    def __init__(self, run: Run, module: nn.Module, module_base: type, callbacks: Iterable[Callback]) -> None:
        callbacks = list(callbacks)
        for name in HOOK_NAMES:
            found: list[Callable[..., Any]] = [
                functools.partial(getattr(callback, name), run, module)
                for callback in callbacks
                if overrides(callback, name, Callback)
            ]
            if hasattr(module_base, name) and overrides(module, name, module_base):
                found.append(getattr(module, name))
            setattr(self, name, tuple(found))

    def __getattr__(self, name: str) -> tuple[Callable[..., Any], ...]:
        raise AttributeError(f"{name!r} is no hook.{did_you_mean(name, HOOK_NAMES)}")

    def call(self, name: str, *args: Any) -> None:
        """Call everybody who overrides the hook."""
        for hook in getattr(self, name):
            hook(*args)


def overrides(instance: object, name: str, base: type) -> bool:
    """Return whether `instance` brings its own method `name` instead of that of `base`."""
    method = getattr(instance, name, None)
    return callable(method) and getattr(method, "__func__", method) is not getattr(base, name, None)


def check_state_keys(callbacks: Iterable[Callback]) -> None:
    """Check that no two callbacks keep their state under one key.

    Raises:
        ConfigError: when two do: one state would be lost.
    """
    seen: set[str] = set()
    for callback in callbacks:
        if not overrides(callback, "state_dict", Callback):
            continue
        if callback.state_key in seen:
            raise ConfigError(
                f"Two callbacks have the state_key {callback.state_key!r}; give each its own, or one state is lost."
            )
        seen.add(callback.state_key)


def callback_states(callbacks: Iterable[Callback]) -> dict[str, dict[str, Any]]:
    """Return the state of every callback that has any, by its key."""
    states = ((callback.state_key, callback.state_dict()) for callback in callbacks)
    return {key: state for key, state in states if state}


def load_callback_states(callbacks: Iterable[Callback], states: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Give each callback its saved state; return the keys of states that no callback took.

    Raises:
        CheckpointError: when a callback cannot read its state.
    """
    remaining = dict(states)
    for callback in callbacks:
        state = remaining.pop(callback.state_key, None)
        if state is None:
            continue
        try:
            callback.load_state_dict(state)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"The saved state of callback {callback.state_key!r} does not fit it: {error!r}; "
                "resume with the callback as it was, or without it."
            ) from error
    return sorted(remaining)
