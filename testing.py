"""Running a function on several real ranks of this machine: for our tests, and for those of users' own strategies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from .strategies.launcher import launch_all

T = TypeVar("T")


def run_ranks(function: Callable[..., T], world_size: int, *args: Any, timeout: float = 60.0) -> list[T]:
    """Return what ``function(*args)`` returned in each of `world_size` new processes, by rank.

    Each process has the variables of torchrun (RANK, WORLD_SIZE, MASTER_ADDR, ...), but has joined no process group.
    """
    return launch_all(functools.partial(function, *args), num_processes=world_size, timeout=timeout)
