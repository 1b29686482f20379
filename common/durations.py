"""Durations, as users write them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from .errors import ConfigError


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
            f"{name} must be a timedelta, its arguments as a dict, or 'DD:HH:MM:SS', got {value!r}."
        ) from None
    return duration
