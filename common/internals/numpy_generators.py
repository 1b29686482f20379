"""Private names of NumPy's random generators (seen in NumPy 2.4.6); to be asked where NumPy was imported."""

from __future__ import annotations

import sys
from typing import Any


def is_global_generator(value: object) -> bool:
    """Return whether a generator is the one behind ``numpy.random.seed`` and its like (`mtrand._rand`)."""
    return value is sys.modules["numpy"].random.mtrand._rand  # noqa: SLF001


def find_bit_generator(generator: Any) -> Any:
    """Return where a ``RandomState`` takes its bits from (`_bit_generator`), which has no public name."""
    return generator._bit_generator  # noqa: SLF001
