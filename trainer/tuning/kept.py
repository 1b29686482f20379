"""Kept values: the attributes of objects, with the contents of their containers and tensors, restored in place."""

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
    """Restore, on exit, the current attributes of these objects and gradients of these parameters.

    Tensors, NumPy arrays, generators, and dicts, lists, sets and deques of them keep their identity and get their
    values back; the contents of other objects are left alone. The copies are on the CPU, so no other device holds both.
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
    """Collects a function that restores each value, once per object however often it occurs."""

    def __init__(self) -> None:
        self._seen: dict[int, object] = {}
        """Objects by identity, kept alive so that no other object gets the same identity."""
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
