"""Functions that traverse nested structures of tensors, such as batches and outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def _return_unchanged(leaf: object) -> object:
    return leaf


def map_tensors(
    function: Callable[[Tensor], Tensor], data: Any, other: Callable[[object], object] = _return_unchanged
) -> Any:
    """Return `data` with ``function(tensor)`` for every tensor and ``other(leaf)`` for every other leaf.

    Traverses mappings, lists, tuples, named tuples and dataclasses; anything else is a leaf.
    """
    if isinstance(data, Tensor):
        return function(data)
    if isinstance(data, Mapping):
        return rebuild_mapping(data, {key: map_tensors(function, value, other) for key, value in data.items()})
    if isinstance(data, list):
        return [map_tensors(function, value, other) for value in data]
    if isinstance(data, tuple):
        values = [map_tensors(function, value, other) for value in data]
        kind: Any = type(data)
        # not the constructor, which may ask its arguments for what only tensors have, as PackedSequence's does
        return kind._make(values) if hasattr(data, "_fields") else kind(values)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        fields = [field.name for field in dataclasses.fields(data) if field.init]
        return dataclasses.replace(data, **{name: map_tensors(function, getattr(data, name), other) for name in fields})
    return other(data)


def rebuild_mapping(original: Mapping[object, object], items: dict[object, object]) -> Mapping[object, object]:
    """Return a mapping of the type of `original` with `items`, or a dict if its constructor does not take a mapping."""
    if type(original) is dict:
        return items
    try:
        return type(original)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def iterate_tensors(data: Any) -> Iterator[Tensor]:
    """Yield every tensor of a nested structure, in order."""
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from iterate_tensors(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from iterate_tensors(value)
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        for field in dataclasses.fields(data):
            yield from iterate_tensors(getattr(data, field.name))


def named_leaves(data: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf, tensor or not, with a name such as ``['loss'][0]``, in the order of `map_tensors`."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from named_leaves(value, f"{name}[{key!r}]")
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            yield from named_leaves(value, f"{name}[{index}]")
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        for field in dataclasses.fields(data):
            if field.init:
                yield from named_leaves(getattr(data, field.name), f"{name}.{field.name}")
    else:
        yield name, data


def with_leaves(data: object, leaves: Iterable[Any]) -> object:
    """Return `data` with its leaves replaced by these, in the order of `named_leaves`."""
    new = iter(leaves)
    return map_tensors(lambda _: next(new), data, lambda _: next(new))


def to_device(data: T, device: torch.device) -> T:
    """Move a nested structure to `device`; to a GPU from pinned memory without blocking.

    A leaf that is not a tensor but has a ``to(device)`` method, such as a PyG batch, is moved with it.
    """
    non_blocking = can_copy_later(device)

    def move_other(leaf: Any) -> object:
        return leaf.to(device) if callable(getattr(leaf, "to", None)) else leaf

    moved: T = map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking), data, move_other)
    return moved


def can_copy_later(device: torch.device) -> bool:
    """Return whether what is computed next on a device waits for a copy to it; the host would read too soon."""
    return device.type != "cpu"
