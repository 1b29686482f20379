"""Running a function on several real ranks of this machine: for our tests, and for those of users' own strategies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from .strategies.launch.launcher import launch_all

T = TypeVar("T")


def run_ranks(function: Callable[..., T], world_size: int, *args: Any, timeout: float = 60.0) -> list[T]:
    """Return what ``function(*args)`` returned in each of `world_size` new processes, by rank.

    Each process has the variables that torchrun would set (RANK, WORLD_SIZE, MASTER_ADDR, ...), but has joined no
    process group. The function may be defined anywhere; it, its arguments and its results travel by value::

        import torch.distributed as dist
        from echelon.testing import run_ranks

        def total(number):
            dist.init_process_group("gloo")
            numbers = torch.tensor(number + dist.get_rank())
            dist.all_reduce(numbers)
            return numbers.item()

        assert run_ranks(total, 2, 10) == [21, 21]

    Args:
        function: what to run.
        world_size: how many processes.
        args: what to call it with.
        timeout: seconds after which all processes are killed.

    Raises:
        ProcessError: if a process was killed or left early; or for ranks that had not finished in time, with the stack
            of each.
        BaseException: what the function raised on a rank, which a note on it names.
    """
    return launch_all(functools.partial(function, *args), num_processes=world_size, timeout=timeout)
