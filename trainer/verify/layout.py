"""Layout: a strategy and the number of its processes on this machine, read from a text such as ``fsdp:4``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...common.errors import ConfigError
from ...strategies import Strategy
from ...strategies.cluster.environment import num_cores
from ...strategies.devices.kinds import CPU, known_types, num_devices
from ...strategies.placement import BY_NAME
from ...strategies.registry import find_strategy

MOST_RANKS: Final = 64


@dataclass(frozen=True)
class Layout:
    """A strategy on some number of processes on this machine.

    Args:
        strategy: the name of a strategy, or one created for this.
        ranks: its processes; or its devices, for a strategy that uses several devices in one process.
        name: what the report calls it; by default the strategy's name, or its degrees, and the number of ranks.

    Raises:
        ConfigError: for a strategy that is not registered or cannot be compared, and for a number that is not possible.
    """

    strategy: str | Strategy
    ranks: int = 2
    name: str = ""

    def __post_init__(self) -> None:
        if type(self.ranks) is not int or not 1 <= self.ranks <= MOST_RANKS:
            raise ConfigError(f"ranks must be a number from 1 to {MOST_RANKS}, got {self.ranks!r}; give one of these.")
        made = find_strategy(self.strategy, BY_NAME, argument="strategies")()
        if made.max_lead:
            raise ConfigError(
                f"strategies must take the steps of one process, got {made.name!r} in a mode in which a rank may be "
                f"{made.max_lead} step(s) ahead of another, and each makes its own updates; give it mode='sync'."
            )
        if not (made.uses_processes or made.uses_many_devices):
            object.__setattr__(self, "ranks", 1)
        if not self.name:
            object.__setattr__(
                self, "name", _make_title(self.strategy if isinstance(self.strategy, str) else made, self.ranks)
            )
        object.__setattr__(self, "_uses_processes", made.uses_processes)

    @property
    def num_processes(self) -> int:
        """The processes to start; one for a strategy that uses all its devices in one process."""
        return self.ranks if vars(self)["_uses_processes"] else 1


def _make_title(strategy: str | Strategy, ranks: int) -> str:
    """Return the name of a strategy, or what it says of its degrees, and the number of ranks."""
    text = str(strategy)
    if not isinstance(strategy, str) and not text.startswith("<"):  # it says something of itself
        return f"{text}, {ranks} ranks"
    name = strategy if isinstance(strategy, str) else strategy.name
    return name + (f" x {ranks}" if ranks > 1 else "")


def layouts_of(given: Sequence[str | Strategy | Layout] | str, ranks: int) -> list[Layout]:
    """Return the layouts that a user names: as ``ddp`` or ``fsdp:4``, as strategies or as layouts.

    Args:
        given: the layouts, in order; or a comma-separated string.
        ranks: the number of processes for those that give none.

    Raises:
        ConfigError: for a layout that is not possible, and if there is none.
    """
    words = [word for word in given.split(",") if word.strip()] if isinstance(given, str) else list(given)
    layouts = [_parse_layout(word, ranks) for word in words]
    if not layouts:
        raise ConfigError(f"strategies must name at least one, got {given!r}; give strategies such as 'ddp,fsdp'.")
    names = [layout.name for layout in layouts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"strategies must differ, got {twice!r} twice; give each its own Layout(..., name=).")
    return layouts


def _parse_layout(given: str | Strategy | Layout, ranks: int) -> Layout:
    if isinstance(given, Layout):
        return given
    if not isinstance(given, str):
        return Layout(given, ranks)
    name, colon, number = given.strip().partition(":")
    if colon and not (number.isascii() and number.isdigit()):
        raise ConfigError(f"strategies has {given!r}, whose ranks must be a number; write '{name}:4', for example.")
    return Layout(name, int(number) if colon else ranks)


def check_devices(layouts: Sequence[Layout], accelerator: str) -> str | None:
    """Return a warning if this machine has fewer cores than ranks.

    Raises:
        ConfigError: for an accelerator that is missing, or that has fewer devices than ranks.
    """
    most = max(layout.ranks for layout in layouts)
    known = [CPU, *known_types()]
    if accelerator not in known:
        raise ConfigError(
            f"devices must be a type of device that torch has, got {accelerator!r}; give one of {', '.join(known)}."
        )
    if accelerator != CPU:
        available = num_devices(accelerator)
        if available < most:
            raise ConfigError(
                f"devices={accelerator!r} with {most} ranks, but this machine has {available} of them; use fewer "
                "ranks, or devices='cpu', where ranks share the cores."
            )
        return None
    cores = num_cores()
    if cores < most:
        return f"{most} ranks share {cores} core(s): this is slow, but does not change the numbers."
    return None
