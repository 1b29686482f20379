"""Helpers for tests, ours and users': run a function on several real ranks of this machine, and compare layouts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from .strategies.launch.launcher import launch_all
from .trainer.verify import Layout, Report, verify

__all__ = ["Layout", "Report", "run_ranks", "verify"]

T = TypeVar("T")


def run_ranks(function: Callable[..., T], world_size: int, *args: object, timeout: float = 240.0) -> list[T]:
    """Run ``function(*args)`` in `world_size` new processes, and return the results in rank order.

    Each process has the environment variables that torchrun sets (RANK, WORLD_SIZE, MASTER_ADDR, ...), but has not
    joined a process group. The function may be defined anywhere; it, its arguments and its results are pickled by
    value::

        import torch.distributed as dist
        from echelon.testing import run_ranks

        def total(number):
            dist.init_process_group("gloo")
            numbers = torch.tensor(number + dist.get_rank())
            dist.all_reduce(numbers)
            return numbers.item()

        assert run_ranks(total, 2, 10) == [21, 21]

    Args:
        function: the function to run.
        world_size: the number of processes.
        args: the arguments of the function.
        timeout: seconds after which all processes are killed.

    Raises:
        ProcessError: if a process was killed or exited early, or if ranks did not finish in time; with their stacks.
        BaseException: the error that the function raised on a rank; a note names the rank.
    """
    return launch_all(functools.partial(function, *args), num_processes=world_size, timeout=timeout)
