"""Types of LightningCLI: annotations for optimizers and schedulers that a config builds, and arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any, Union

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau as Plateau


class ReduceLROnPlateau(Plateau):
    """torch's scheduler with the name of the metric that it follows.

    Args:
        optimizer: the optimizer.
        monitor: the metric.
        args: torch's arguments.
        kwargs: torch's arguments.
    """

    def __init__(self, optimizer: Optimizer, monitor: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args, **kwargs)
        self.monitor = monitor


# Unions of typing, since programs use them as such: get_args, Optional[...]
LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerTypeUnion = Union[LRScheduler, ReduceLROnPlateau]  # noqa: UP007
LRSchedulerType = Union[type[LRScheduler], type[ReduceLROnPlateau]]  # noqa: UP007
ArgsType = Union[list[str], dict[str, Any], argparse.Namespace, None]  # noqa: UP007
OptimizerCallable = Callable[[Iterable], Optimizer]  # type: ignore[type-arg]  # of anything
LRSchedulerCallable = Callable[[Optimizer], Union[LRScheduler, ReduceLROnPlateau]]  # noqa: UP007
