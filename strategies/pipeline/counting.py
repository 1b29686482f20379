"""CountedOnce: of the stages that run a step, one takes what it logs and what it updates in metric objects."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import nn

from ..module.traces import KeptObjects

_METHODS: Final = ("update", "compute", "reset")
"""What makes a module a metric object, such as torchmetrics' ``Metric``, which accumulates by itself."""


class CountedOnce:
    """Lets ``self.log`` and the metric objects of a module take values only where they count.

    Args:
        module: whose step runs on several stages.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        reached = KeptObjects()
        reached.keep(module)  # a metric in a plain list or dict is not a submodule
        self._metrics: list[Any] = [
            part for part in reached.modules if all(callable(getattr(part, name, None)) for name in _METHODS)
        ]

    @contextmanager
    def where(self, counts: Callable[[], bool]) -> Iterator[None]:
        """Let what is logged and updated inside count while `counts` says so.

        It is asked at each call: the values may come from parts that are called in between.
        """
        guards = [(self._module, "log", _Guard(self._module.log, counts, _nothing))]
        for metric in self._metrics:
            guards.append((metric, "update", _Guard(metric.update, counts, _nothing)))
            guards.append((metric, "forward", _Guard(metric.forward, counts, _ForwardOfCopy(metric))))
        before = [vars(owner).get(name) for owner, name, _ in guards]
        for owner, name, guard in guards:
            vars(owner)[name] = guard
        try:
            yield
        finally:
            for (owner, name, _), method in zip(guards, before, strict=True):
                del vars(owner)[name]
                if method is not None:
                    vars(owner)[name] = method


class _Guard:
    """A method, or what is called instead of it where its arguments do not count."""

    def __init__(self, method: Callable[..., Any], counts: Callable[[], bool], otherwise: Callable[..., Any]) -> None:
        self._method, self._counts, self._otherwise = method, counts, otherwise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(*args, **kwargs) if self._counts() else self._otherwise(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> _Guard:
        return self


class _ForwardOfCopy:
    """A metric's value of one batch, which leaves no trace in the metric."""

    def __init__(self, metric: nn.Module) -> None:
        self._metric = metric

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        copied = copy.deepcopy(self._metric)
        for part in copied.modules():
            for name in [name for name, value in vars(part).items() if isinstance(value, _Guard)]:
                del vars(part)[name]
        return copied(*args, **kwargs)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass
