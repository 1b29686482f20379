"""Window: the micro-batches of one optimizer step on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Window = Sequence[tuple[Any, int]]
"""The micro-batches of one step on this rank, each with its number of samples."""


def num_samples(window: Window) -> int:
    """Return how many samples a window has on this rank."""
    return sum(size for _, size in window)
