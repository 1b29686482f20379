"""The only place where a strategy is a string: its name, to the strategy itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from .data_parallel import DataParallelStrategy
from .ddp import DDPStrategy
from .elastic import ElasticStrategy
from .errors import ConfigError, did_you_mean
from .fsdp import FSDPStrategy
from .local_sgd import LocalSGDStrategy
from .single import SingleDeviceStrategy
from .strategy import Strategy
from .zero import ZeroStrategy

_BY_NAME: Final[dict[str, Callable[[], Strategy]]] = {
    **{
        strategy.name: strategy
        for strategy in (
            SingleDeviceStrategy,
            DataParallelStrategy,
            DDPStrategy,
            ZeroStrategy,
            LocalSGDStrategy,
            FSDPStrategy,
            ElasticStrategy,
        )
    },
    "hsdp": partial(FSDPStrategy, replicate="nodes"),
}


def check_strategy(strategy: str | Strategy) -> None:
    """Check that there is such a strategy; ``auto`` stands for one of them.

    Raises:
        ConfigError: for a name that no strategy has.
    """
    known = [*_BY_NAME, "auto"]
    if not isinstance(strategy, Strategy) and strategy not in known:
        raise ConfigError(f"strategy={strategy!r} is not a known strategy.{did_you_mean(str(strategy), known)}")


def strategy_by_name(strategy: str | Strategy) -> Strategy:
    """Return the strategy of that name with its defaults; a strategy is returned as it is."""
    return strategy if isinstance(strategy, Strategy) else _BY_NAME[strategy]()
