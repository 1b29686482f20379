"""Registry of the strategies that train, by name: with `placement`, the only place where a strategy is a string."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from ..common.errors import ConfigError, did_you_mean
from .single import SingleDeviceStrategy
from .strategy import Strategy

Factory = Callable[[], Strategy]


def make(kind: str, **settings: object) -> Strategy:
    """Return a strategy of the class of this name, whose module is imported only now: a run needs one of them."""
    made: Strategy = getattr(sys.modules[__package__], kind)(**settings)
    return made


STRATEGIES: Final[Mapping[str, Factory]] = {
    "single": SingleDeviceStrategy,
    "dp": partial(make, "DataParallelStrategy"),
    "ddp": partial(make, "DDPStrategy"),
    "zero": partial(make, "ZeroStrategy"),
    "local_sgd": partial(make, "LocalSGDStrategy"),
    "fsdp": partial(make, "FSDPStrategy"),
    "hsdp": partial(make, "FSDPStrategy", replicate="nodes"),
    "device_map": partial(make, "DeviceMapStrategy"),
    "ps": partial(make, "ParameterServerStrategy"),
    "tp": partial(make, "ParallelStrategy", dp_shard="nodes", tp="auto"),
    "pp": partial(make, "ParallelStrategy", pp="auto", dp_shard=1),
}
"""All strategies that train by themselves; `ElasticStrategy` contains one of them."""

_LIGHTNING: Final[Mapping[str, Factory]] = {
    "single_device": SingleDeviceStrategy,
    "fsdp_cpu_offload": partial(make, "FSDPStrategy", cpu_offload=True),
    # how processes are started makes no difference here
    **{
        f"ddp{start}{ending}": partial(make, "DDPStrategy", find_unused_parameters=ending.endswith("true"))
        for start in ("", "_spawn", "_fork", "_notebook")
        for ending in ("", "_find_unused_parameters_false", "_find_unused_parameters_true")
    },
}
"""Lightning's names for the same strategies."""

_NEAREST: Final[Mapping[str, str]] = {
    "deepspeed_stage_1": "zero",
    "deepspeed": "fsdp",
    "model_parallel": "tp",
    "single_xla": "single",
    "xla_fsdp": "fsdp",
    "xla": "ddp",
}
"""Prefixes of Lightning's other names, and the strategy to use instead; the first match counts."""


def find_strategy(
    strategy: object, known: Mapping[str, Factory] = STRATEGIES, *, argument: str = "strategy"
) -> Factory:
    """Return a function that makes the named strategy with its defaults, or that returns a given strategy as is.

    Args:
        strategy: one of the names in `known`, or Lightning's name for it; or a strategy.
        known: the strategies to choose from.
        argument: what the user calls it.

    Raises:
        ConfigError: for anything else.
    """
    if isinstance(strategy, Strategy):
        return lambda: strategy
    if isinstance(strategy, type):
        name = strategy.__name__
        raise ConfigError(f"{argument} must be a strategy, got the class {name}; write {argument}={name}().")
    if isinstance(strategy, list | tuple) and len(strategy) == 1:
        raise ConfigError(f"{argument} must be one strategy, got a list, {strategy!r:.80}; write it without the list.")
    if not isinstance(strategy, str):
        raise ConfigError(
            f"{argument} must be a strategy of Echelon or the name of one, got {strategy!r:.80}; use one of "
            f"{', '.join(known)}."
        )
    if strategy in known or strategy in _LIGHTNING:
        return known.get(strategy) or _LIGHTNING[strategy]
    nearest = next((name for start, name in _NEAREST.items() if strategy.startswith(start)), None)
    if nearest is not None:
        raise ConfigError(f"Echelon does not have Lightning's {argument}={strategy!r}; use {nearest!r} instead.")
    raise ConfigError(f"{argument}={strategy!r} is not a known strategy.{did_you_mean(strategy, known)}")
