"""Numbers: how a dealt stream seeds and sets aside random numbers, also in worker processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple


class Numbers(NamedTuple):
    """Functions of the room above, which must be known in workers by their names."""

    stream: Callable[[int], AbstractContextManager[None]]
    """Returns a stream of random numbers of its own, which code draws from inside ``with``."""
    seed: Callable[[int], None]
    """Seeds the generators of this process."""
    mix: Callable[[int, int], int]
    """Returns a seed made from a seed and a key."""
