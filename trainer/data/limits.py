"""Limits: the number of batches to read from a loader."""

from __future__ import annotations

import math
import warnings

from ...strategies.errors import ConfigError

Count = int | float
"""A number of batches; infinity if the data does not know."""


def limited(limit: int | float, length: int | None, name: str, what: str) -> Count:
    """Return the number of a loader's batches within a limit.

    Raises:
        ConfigError: for a fraction that leaves nothing, or a fraction of an unknown length.
    """
    if length is None:
        if isinstance(limit, float) and limit not in (0.0, 1.0):
            raise ConfigError(
                f"{name}={limit} is a fraction, but the {what} loader has no length; give batches as an int."
            )
        return math.inf if isinstance(limit, float) and limit else limit
    if isinstance(limit, int):
        if limit > length > 0:
            warnings.warn(
                f"{name}={limit}, but the {what} loader has only {length} batches: all are used.", stacklevel=2
            )
        return min(limit, length)
    count = int(length * limit)
    if count == 0 and limit > 0 and length > 0:
        raise ConfigError(
            f"{name}={limit} of {length} batches is less than one batch; give at least {1 / length:.3g}, or "
            "batches as an int."
        )
    return count
