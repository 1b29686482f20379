"""Cutting a batch into parts for several devices, and making one result of what the parts gave."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..distributed.nested import iterate_tensors, rebuild_mapping
from ..errors import DataError, ModuleError


def split(batch: Any, num_parts: int) -> tuple[list[Any], list[int]]:
    """Return a batch in at most so many parts, and the number of samples of each, as ``torch.chunk`` cuts.

    Tensors are cut along their first dimension, lists with an entry for each sample likewise; a tensor without a
    dimension, and anything else, is given to every part. A batch without a tensor to cut is one part.

    Raises:
        DataError: if tensors have different lengths, so that there is no telling which rows belong together.
    """
    lengths = [len(tensor) for tensor in iterate_tensors(batch) if tensor.dim()]
    if len(set(lengths)) > 1 and num_parts > 1:
        raise DataError(
            f"A batch is cut into parts along the first dimension of its tensors, whose lengths are {lengths}; let "
            "all have one row for each sample, or train on one device or with strategy='ddp'."
        )
    length = lengths[0] if lengths else 1
    if num_parts == 1 or length <= 1:
        return [batch], [length]
    step = -(-length // num_parts)
    starts = range(0, length, step)
    parts = [_rows(batch, start, start + step, length) for start in starts]
    return parts, [min(step, length - start) for start in starts]


def _rows(data: Any, start: int, stop: int, length: int) -> Any:
    if isinstance(data, Tensor):
        return data[start:stop] if data.dim() else data
    if isinstance(data, list) and len(data) == length and next(iterate_tensors(data), None) is None:
        return data[start:stop]
    return _by_child(lambda child: _rows(child, start, stop, length), data)


def combine(results: Sequence[Any], sizes: Sequence[int], where: str) -> Any:
    """Return what the whole batch would have given, of what its parts gave.

    Parts that gave None are left out. Numbers and tensors with a fraction are averaged, weighted by samples, and whole
    numbers summed; tensors with a row for each sample are concatenated, lists with an entry for each sample likewise.
    A dataclass that can be added is summed. Mappings, tuples and other dataclasses are combined entry by entry.

    Raises:
        ModuleError: for results of which no one result can be made.
    """
    given = [(result, size) for result, size in zip(results, sizes, strict=True) if result is not None]
    if len(given) <= 1:
        return given[0][0] if given else None
    parts, sizes = [result for result, _ in given], [size for _, size in given]
    first = parts[0]
    if all(isinstance(part, Tensor) for part in parts):
        return _combine_tensors(parts, sizes, where)
    if len({type(part) for part in parts}) > 1:
        raise _cannot(where, parts)
    if isinstance(first, Mapping):
        if any(part.keys() != first.keys() for part in parts):
            raise _cannot(where, [sorted(map(str, part)) for part in parts])
        made = {key: combine([part[key] for part in parts], sizes, f"{where}[{key!r}]") for key in first}
        return rebuild_mapping(first, made)
    if isinstance(first, list) and [len(part) for part in parts] == list(sizes) and not _holds_rows(parts, sizes):
        return [entry for part in parts for entry in part]
    if isinstance(first, list | tuple) and any(len(part) != len(first) for part in parts):
        raise _cannot(where, [f"{len(part)} entries" for part in parts])
    if _is_dataclass(first) and hasattr(first, "__add__"):
        return reduce(operator.add, parts)
    if isinstance(first, list | tuple) or _is_dataclass(first):
        return _by_child(lambda *children: combine(children, sizes, where), *parts)
    return _combine_others(parts, sizes, where)


def _combine_tensors(parts: Sequence[Tensor], sizes: Sequence[int], where: str) -> Tensor:
    has_rows = all(part.dim() and len(part) == size for part, size in zip(parts, sizes, strict=True))
    if has_rows and all(part.shape[1:] == parts[0].shape[1:] for part in parts):
        return torch.cat(list(parts))
    if has_rows or any(part.shape != parts[0].shape for part in parts):
        raise _cannot(where, [f"shape {tuple(part.shape)}" for part in parts])
    has_fraction = parts[0].is_floating_point() or parts[0].is_complex()
    return reduce(torch.add, _weighted(parts, sizes) if has_fraction else parts)


def _combine_others(parts: Sequence[Any], sizes: Sequence[int], where: str) -> Any:
    first = parts[0]
    if isinstance(first, float):
        return sum(_weighted(parts, sizes))
    if isinstance(first, int) and not isinstance(first, bool):
        return sum(parts)
    if isinstance(first, str | bool) and all(part == first for part in parts):
        return first
    raise _cannot(where, parts)


def _weighted(parts: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
    return [part * (size / sum(sizes)) for part, size in zip(parts, sizes, strict=True)]


def _holds_rows(parts: Sequence[list[Any]], sizes: Sequence[int]) -> bool:
    """Return whether the entries of these lists are tensors with a row for each sample, and not one a sample."""
    entries = [(entry, size) for part, size in zip(parts, sizes, strict=True) for entry in part]
    return all(isinstance(entry, Tensor) and entry.dim() and len(entry) == size for entry, size in entries)


def _by_child(function: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Return a structure like `first`, of what `function` makes of each child of it and of the others'."""
    if isinstance(first, Mapping):
        return rebuild_mapping(first, {key: function(first[key], *(other[key] for other in others)) for key in first})
    if isinstance(first, list | tuple):
        made = [function(*children) for children in zip(first, *others, strict=True)]
        return type(first)(*made) if hasattr(first, "_fields") else type(first)(made)
    if _is_dataclass(first):
        names = [field.name for field in dataclasses.fields(first) if field.init]
        changes = {name: function(*(getattr(one, name) for one in (first, *others))) for name in names}
        return dataclasses.replace(first, **changes)
    return first


def _is_dataclass(data: Any) -> bool:
    return dataclasses.is_dataclass(data) and not isinstance(data, type)


def _cannot(where: str, found: Sequence[Any]) -> ModuleError:
    kinds = {type(one).__name__ for one in found}
    shown = sorted(kinds) if len(kinds) > 1 else [one if isinstance(one, str) else f"{one!r:.60}" for one in found]
    return ModuleError(
        f"{where} returned, for the parts of one batch, {', '.join(shown)}, of which no one result can be made; return "
        "tensors with a row for each sample, numbers, or mappings of those, with the same keys for every batch."
    )
