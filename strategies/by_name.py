"""The only place where a strategy is a string: its name, to the strategy itself."""

from __future__ import annotations

from typing import Final

from .ddp import DDPStrategy
from .errors import ConfigError, did_you_mean
from .single import SingleDeviceStrategy
from .strategy import Strategy

_BY_NAME: Final[dict[str, type[Strategy]]] = {
    strategy.name: strategy
    for strategy in (
        SingleDeviceStrategy,
        DDPStrategy,
    )
}


def strategy_by_name(strategy: str | Strategy) -> Strategy:
    """Return the strategy of that name with its defaults; a strategy is returned as it is.

    Raises:
        ConfigError: for a name that no strategy has.
    """
    if isinstance(strategy, Strategy):
        return strategy
    if strategy not in _BY_NAME:
        raise ConfigError(
            f"strategy={strategy!r} is not a known strategy.{did_you_mean(str(strategy), [*_BY_NAME, 'auto'])}"
        )
    return _BY_NAME[strategy]()
