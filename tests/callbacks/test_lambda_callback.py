"""Hooks from plain functions."""

from __future__ import annotations

import pytest

from echelon.callbacks import Callback, LambdaCallback
from echelon.callbacks.dispatch import HOOK_NAMES, overrides_method
from echelon.common.errors import ConfigError


def test_every_hook_can_be_given() -> None:
    for name in HOOK_NAMES:
        callback = LambdaCallback(**{name: lambda *_: None})
        assert [hook for hook in HOOK_NAMES if overrides_method(callback, hook, Callback)] == [name]


def test_none_is_as_if_not_given() -> None:
    callback = LambdaCallback(on_train_start=None)
    assert not overrides_method(callback, "on_train_start", Callback)


def test_a_misspelt_hook_is_pointed_out() -> None:
    with pytest.raises(ConfigError, match="'on_train_strat' is not a hook. Did you mean 'on_train_start'?"):
        LambdaCallback(on_train_strat=lambda trainer, module: None)


def test_a_value_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(ConfigError, match="on_fit_end must be a function of the hook's arguments, got 3"):
        LambdaCallback(on_fit_end=3)  # type: ignore[arg-type]
