"""Kept values: the attributes of objects, with what they hold and what functions reach, restored in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ...strategies.module.traces import KeptObjects


@contextmanager
def restore_on_exit(
    objects: Iterable[object], parameters: Iterable[nn.Parameter], functions: Iterable[object] = ()
) -> Iterator[None]:
    """Restore, on exit, the current attributes of these objects and gradients of these parameters.

    What is found from there keeps its identity and gets its values back, as in `Traceless`. The copies are on the CPU,
    so no other device holds both.

    Args:
        objects: the objects.
        parameters: those whose gradients are restored; if there are any, tensors that are trained are restored, too.
        functions: functions that run meanwhile; what they reach by name is restored as well.
    """
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    keeper = KeptObjects(parameters=bool(gradients), device=torch.device("cpu"))
    for one in objects:
        keeper.keep_attributes(one)
    for _, gradient in gradients:
        keeper.keep(gradient)
    keeper.keep(*functions)
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        keeper.put_back()
