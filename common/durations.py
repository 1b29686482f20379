"""Durations, and amounts of samples and tokens, as users write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Final, Literal, NamedTuple

from .errors import ConfigError

Unit = Literal["samples", "tokens"]
_AMOUNT: Final = re.compile(r"([\d_]+(?:\.\d+)?)\s*([kmbt]?)\s*(samples?|tokens?)", re.IGNORECASE)
_FACTORS: Final = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


class Amount(NamedTuple):
    """A number of samples or tokens."""

    number: int
    unit: Unit

    def is_reached(self, before: int, after: int) -> bool:
        """Return whether another multiple of this amount lies between two counts, the second included."""
        return after // self.number > before // self.number


def parse_amount(name: str, value: object) -> Amount | None:
    """Return the argument called `name`, such as ``"10_000 samples"`` or ``"2.5M tokens"``; None for another kind.

    Raises:
        ConfigError: for an amount below 1.
    """
    found = _AMOUNT.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        return None
    number = round(float(found[1]) * _FACTORS[found[2].lower()])
    if number < 1:
        raise ConfigError(f"{name} must be at least 1 sample or token, got {value!r}; give a larger number.")
    return Amount(number, "tokens" if found[3].lower().startswith("token") else "samples")


def parse_duration(name: str, value: str | timedelta | Mapping[str, int] | None) -> timedelta | None:
    """Return the argument called `name` as a timedelta.

    Raises:
        ConfigError: unless it is a timedelta, its arguments, or ``"DD:HH:MM:SS"``; or if it is negative.
    """
    try:
        if isinstance(value, str):
            days, hours, minutes, seconds = (int(part) for part in value.split(":"))
            duration: timedelta | None = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        elif isinstance(value, Mapping):
            duration = timedelta(**value)
        else:
            duration = value
        if duration is not None and (not isinstance(duration, timedelta) or duration < timedelta()):
            raise ValueError
    except (TypeError, ValueError):
        raise ConfigError(
            f"{name} must be a timedelta, its arguments as a dict, or text in the format DD:HH:MM:SS, got {value!r}."
        ) from None
    return duration
