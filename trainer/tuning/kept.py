"""Kept values: the attributes of objects and what their containers and tensors hold, to be put back in place."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...strategies.state.dtensor import local_shard

PutBack = Callable[[], object]


@contextmanager
def kept(objects: Iterable[object], parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Put back at the end what the attributes of these objects are now, and the gradients of these parameters.

    Tensors, NumPy arrays, generators, and dicts, lists, sets and deques of such keep their identity and get their
    values back; what other objects hold is left alone. The copies are on the CPU, so that no other device holds both.
    """
    keeper = _Keeper()
    for one in objects:
        keeper.keep(vars(one))
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    for _, gradient in gradients:
        keeper.keep(gradient)
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        keeper.put_back()


class _Keeper:
    """Collects what puts each value back, once for each object however often it is met."""

    def __init__(self) -> None:
        self._seen: dict[int, object] = {}
        """By identity; holds the object, whose identity no other gets meanwhile."""
        self._put_back: list[PutBack] = []

    def put_back(self) -> None:
        with torch.no_grad():
            for put_back in self._put_back:
                put_back()

    def keep(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            values = local_shard(value).detach()
            self._put_back.append(partial(values.copy_, values.to("cpu", copy=True)))
        elif isinstance(value, torch.Generator):
            self._put_back.append(partial(value.set_state, value.get_state()))
        elif _is_array(value):
            self._put_back.append(partial(value.__setitem__, ..., value.copy()))
        elif isinstance(value, dict):
            self._put_back.append(partial(_refill, value, dict(value)))
            self._keep_all(value.values())
        elif isinstance(value, set):
            self._put_back.append(partial(_refill_set, value, list(value)))
        elif isinstance(value, list | deque):
            self._put_back.append(partial(_refill_list, value, list(value)))
            self._keep_all(value)
        elif isinstance(value, tuple):
            self._keep_all(value)

    def _keep_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.keep(value)


def _is_array(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _refill(mapping: dict[Any, Any], saved: dict[Any, Any]) -> None:
    mapping.clear()
    mapping.update(saved)


def _refill_set(values: set[Any], saved: list[Any]) -> None:
    values.clear()
    values.update(saved)


def _refill_list(values: list[Any] | deque[Any], saved: list[Any]) -> None:
    values.clear()
    values.extend(saved)
