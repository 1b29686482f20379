"""Dispatch of hooks: for each hook, who overrides it, resolved once per run instead of once per step."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from torch import nn

from ..common.errors import CheckpointError, ConfigError, ModuleError, did_you_mean
from .callback import Callback
from .run import Run

_NOT_HOOKS: Final = {
    "path_attributes",
    "state_key",
    "earlier_state_keys",
    "state_dict",
    "load_state_dict",
    "check_strategy",
    "log",
    "log_dict",
}
HOOK_NAMES: Final = tuple(name for name in vars(Callback) if not name.startswith("_") and name not in _NOT_HOOKS)


class Hooks:
    """The hooks of one run: an attribute for each, with the callables to call, callbacks first, the module last.

    The callables of callbacks are bound to the trainer and the module, so all of one name take the same arguments.
    Between `setup` and `teardown` the callbacks' ``log`` and ``log_dict`` are the module's.
    """

    __slots__ = HOOK_NAMES
    setup: tuple[Callable[..., object], ...]
    teardown: tuple[Callable[..., object], ...]

    def __init__(self, run: Run, module: nn.Module, module_base: type, callbacks: Iterable[Callback]) -> None:
        callbacks = list(callbacks)
        for name in HOOK_NAMES:
            hooks: list[Callable[..., object]] = [
                functools.partial(_fit_hook_arguments(getattr(callback, name), name, callback), run, module)
                for callback in callbacks
                if overrides_method(callback, name, Callback)
            ]
            if hasattr(module_base, name) and overrides_method(module, name, module_base):
                hooks.append(_fit_hook_arguments(getattr(module, name), name, module))
            setattr(self, name, tuple(hooks))
        self.setup = (functools.partial(_lend_log, module, callbacks), *self.setup)
        self.teardown = (*self.teardown, functools.partial(_take_log_back, module, callbacks))

    def __getattr__(self, name: str) -> tuple[Callable[..., Any], ...]:
        raise AttributeError(f"{name!r} is not a hook.{did_you_mean(name, HOOK_NAMES)}")

    def call(self, name: str, *args: Any) -> None:
        """Call the hook of every callback, then of the module, that overrides it."""
        for hook in getattr(self, name):
            hook(*args)


def _fit_hook_arguments(hook: Callable[..., object], name: str, owner: object) -> Callable[..., object]:
    """Return a hook that takes the arguments of `Callback`'s, even if the user's leaves out ``dataloader_idx``.

    Raises:
        ConfigError: for a callback's hook that takes other arguments.
        ModuleError: for such a hook of a module.
    """
    names = list(inspect.signature(getattr(Callback, name)).parameters)[1:]
    if not isinstance(owner, Callback):
        del names[:2]  # the trainer and the module
    signature = inspect.signature(hook)
    if _accepts_arguments(signature, len(names)):
        return hook
    if names[-1:] == ["dataloader_idx"] and _accepts_arguments(signature, len(names) - 1):
        return lambda *args: hook(*args[:-1])
    kind = ConfigError if isinstance(owner, Callback) else ModuleError
    raise kind(
        f"{type(owner).__name__}.{name} must take ({', '.join(names)}), got {name}({', '.join(signature.parameters)}); "
        f"define {name}({', '.join(['self', *names])})."
    )


def _accepts_arguments(signature: inspect.Signature, number: int) -> bool:
    """Return whether a function with this signature can be called with this number of positional arguments."""
    try:
        signature.bind(*range(number))
    except TypeError:
        return False
    return True


def _lend_log(module: nn.Module, callbacks: Iterable[Callback], stage: str) -> None:
    """Let each callback log as the module does, except under a name that it uses for something else."""
    for callback in callbacks:
        for name in ("log", "log_dict"):
            if getattr(getattr(callback, name), "__func__", None) is getattr(Callback, name):
                vars(callback)[name] = getattr(module, name)


def _take_log_back(module: nn.Module, callbacks: Iterable[Callback], stage: str) -> None:
    for callback in callbacks:
        for name in ("log", "log_dict"):
            if vars(callback).get(name) == getattr(module, name):
                del vars(callback)[name]


def overrides_method(instance: object, name: str, base: type) -> bool:
    """Return whether `instance` has a method `name` other than that of `base`."""
    method = getattr(instance, name, None)
    return callable(method) and getattr(method, "__func__", method) is not getattr(base, name, None)


def check_state_keys(callbacks: Iterable[Callback]) -> None:
    """Check that no two callbacks save their state under the same key.

    Raises:
        ConfigError: if two do, since one state would be lost.
    """
    seen: set[str] = set()
    for callback in callbacks:
        if not overrides_method(callback, "state_dict", Callback):
            continue
        if callback.state_key in seen:
            raise ConfigError(
                f"The state_key of each callback must be unique, got {callback.state_key!r} twice; override state_key "
                "in one of them."
            )
        seen.add(callback.state_key)


def callback_states(callbacks: Iterable[Callback]) -> dict[str, dict[str, object]]:
    """Return the state of every callback that has one, by its key."""
    states = ((callback.state_key, callback.state_dict()) for callback in callbacks)
    return {key: state for key, state in states if state}


def load_callback_states(callbacks: Iterable[Callback], states: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Load the saved state of each callback; return the keys of the states without a callback.

    Raises:
        CheckpointError: if a callback cannot read its state.
    """
    remaining = dict(states)
    for callback in callbacks:
        keys = [key for key in (callback.state_key, *callback.earlier_state_keys) if key in remaining]
        state = remaining.pop(keys[0]) if keys else None
        if state is None:
            continue
        try:
            callback.load_state_dict(state)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"The saved state of callback {callback.state_key!r} does not match it: {error!r}; resume with the "
                "callback as it was, or without it."
            ) from error
    return sorted(remaining)
