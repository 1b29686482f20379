"""Profiles of a module for a plan: without and with activation checkpointing, of whole and of halved micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...callbacks.callback import Callback
from ...strategies import ActivationCheckpointing
from ...strategies.errors import ConfigError
from ...strategies.estimate.profile import Profile
from ..module.train_module import TrainModule
from .plan import Profiles
from .profiling import ProfilingStrategy, take_profile

FitOnce = Callable[[ProfilingStrategy, Callback, ActivationCheckpointing | None], None]
"""Trains the module with a strategy, a callback and a setting of activation checkpointing."""


def take_profiles(
    fit: FitOnce,
    module: TrainModule,
    *,
    given: ActivationCheckpointing | None = None,
    measures: bool = False,
    mode: Any = None,
) -> Profiles:
    """Return the profiles of a module's step.

    Args:
        fit: trains the module.
        module: see `take_profile`.
        given: the user's setting of activation checkpointing, used where activations are computed again.
        measures: see `ProfilingStrategy`.
        mode: see `ProfilingStrategy`.
    """
    strategy = ProfilingStrategy(measures=measures, mode=mode)
    if not measures:
        mode = strategy.mode
    first = take_profile(lambda strategy, callback: fit(strategy, callback, None), module, strategy)

    def again(num_samples: int | None, setting: ActivationCheckpointing | None) -> Profile:
        strategy = ProfilingStrategy(num_samples=num_samples, measures=measures, mode=mode, updates=False)
        profile = take_profile(lambda strategy, callback: fit(strategy, callback, setting), module, strategy)
        return replace(profile, state=first.state, update_bytes=first.update_bytes)

    whole, halved = {False: first}, {}
    half = first.num_samples // 2
    setting = _usable(given or ActivationCheckpointing(), module)
    if half:
        halved[False] = again(half, None)
    if setting is not None:
        whole[True] = again(None, setting)
        if half:
            halved[True] = again(half, setting)
    return Profiles(whole=whole, halved=halved)


def _usable(setting: ActivationCheckpointing, module: TrainModule) -> ActivationCheckpointing | None:
    try:
        setting.submodules(module)
    except ConfigError:
        return None  # there is nothing whose activations could be computed again
    return setting
