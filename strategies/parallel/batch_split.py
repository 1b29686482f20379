"""Batch splitting: a batch is cut into slices for several devices, and their results are combined."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ...common.errors import DataError, ModuleError
from ..distributed.nested import iterate_tensors, rebuild_mapping
from ..targets.target_mean import TargetMean, note_target_mean, target_mean_of


def split_batch(batch: object, num_slices: int) -> tuple[list[Any], list[int]]:
    """Return at most `num_slices` slices of a batch, as ``torch.chunk`` would, and the number of samples in each.

    Tensors are cut along their first dimension, and so are lists with one entry per sample; a tensor without
    dimensions, and anything else, is in every slice. A batch without a tensor to cut is a single slice.

    Raises:
        DataError: if tensors have different lengths, so that it is unknown which rows belong together.
    """
    lengths = [len(tensor) for tensor in iterate_tensors(batch) if tensor.dim()]
    if len(set(lengths)) > 1 and num_slices > 1:
        raise DataError(
            f"The tensors of a batch must have equal lengths to be cut into slices for several devices, got {lengths}; "
            "give each tensor one row for each sample, or train on one device or with strategy='ddp'."
        )
    length = lengths[0] if lengths else 1
    if num_slices == 1 or length <= 1:
        return [batch], [length]
    step = -(-length // num_slices)
    starts = range(0, length, step)
    slices = [_slice_rows(batch, start, start + step, length) for start in starts]
    return slices, [min(step, length - start) for start in starts]


def _slice_rows(data: object, start: int, stop: int, length: int) -> object:
    if isinstance(data, Tensor):
        return data[start:stop] if data.dim() else data
    if isinstance(data, list) and len(data) == length and next(iterate_tensors(data), None) is None:
        return data[start:stop]
    return _by_child(lambda child: _slice_rows(child, start, stop, length), data)


def combine_results(results: Sequence[Any], sizes: Sequence[int], where: str) -> object:
    """Combine the results for the slices of a batch into one for the whole batch; `where` names them in errors.

    None is left out. Floating-point numbers and tensors are averaged, weighted by samples; integers are summed. Tensors
    with one row per sample are concatenated, and so are lists with one entry per sample. A dataclass that supports
    addition is summed. Mappings, tuples and other dataclasses are combined entry by entry.

    Raises:
        ModuleError: for results that cannot be combined.
    """
    given = [(result, size) for result, size in zip(results, sizes, strict=True) if result is not None]
    if len(given) <= 1:
        return given[0][0] if given else None
    results, sizes = [result for result, _ in given], [size for _, size in given]
    first = results[0]
    if all(isinstance(result, Tensor) for result in results):
        return _combine_tensors(results, sizes, where)
    if len({type(result) for result in results}) > 1:
        raise _cannot_combine_error(where, results)
    if isinstance(first, Mapping):
        if any(result.keys() != first.keys() for result in results):
            raise _cannot_combine_error(where, [sorted(map(str, result)) for result in results])
        made = {key: combine_results([result[key] for result in results], sizes, f"{where}[{key!r}]") for key in first}
        return rebuild_mapping(first, made)
    if (
        isinstance(first, list)
        and [len(result) for result in results] == list(sizes)
        and not _holds_rows(results, sizes)
    ):
        return [entry for result in results for entry in result]
    if isinstance(first, list | tuple) and any(len(result) != len(first) for result in results):
        raise _cannot_combine_error(where, [f"{len(result)} entries" for result in results])
    if _is_dataclass(first) and hasattr(first, "__add__"):
        return reduce(operator.add, results)
    if isinstance(first, list | tuple) or _is_dataclass(first):
        return _by_child(lambda *children: combine_results(children, sizes, where), *results)
    return _combine_others(results, sizes, where)


def _combine_tensors(results: Sequence[Tensor], sizes: Sequence[int], where: str) -> Tensor:
    has_rows = all(result.dim() and len(result) == size for result, size in zip(results, sizes, strict=True))
    if has_rows and all(result.shape[1:] == results[0].shape[1:] for result in results):
        return torch.cat(list(results))
    if has_rows or any(result.shape != results[0].shape for result in results):
        raise _cannot_combine_error(where, [f"shape {tuple(result.shape)}" for result in results])
    has_fraction = results[0].is_floating_point() or results[0].is_complex()
    if not has_fraction:
        return sum(results[1:], results[0])
    means = [target_mean_of(result) for result in results]
    if any(means):
        # a slice without targets may have returned 0
        given = [mean or _of_nothing(result) for mean, result in zip(means, results, strict=True)]
        of_targets = [mean for mean in given if mean is not None]
        if len(of_targets) == len(results):
            return _mean_over_targets(results, of_targets)
    combined: Tensor = reduce(torch.add, _weigh_by_size(results, sizes))
    return combined


def _of_nothing(result: Tensor) -> TargetMean | None:
    return None if result.item() else TargetMean(result.detach(), 0)


def _mean_over_targets(results: Sequence[Tensor], means: Sequence[TargetMean]) -> Tensor:
    """Return the mean over the targets of all slices, of which some may have none."""
    counts = [mean.count.to(result.device) for result, mean in zip(results, means, strict=True)]
    total = sum(counts[1:], counts[0])
    shares = [
        torch.where(count > 0, result, 0.0) * (count / total) for result, count in zip(results, counts, strict=True)
    ]
    combined: Tensor = reduce(torch.add, shares)
    note_target_mean(combined, TargetMean(total, sum(mean.number for mean in means)))
    return combined


def _combine_others(results: Sequence[object], sizes: Sequence[int], where: str) -> Any:
    first = results[0]
    if isinstance(first, float):
        return sum(_weigh_by_size(results, sizes))
    if isinstance(first, int) and not isinstance(first, bool):
        return sum(results)
    if isinstance(first, str | bool) and all(result == first for result in results):
        return first
    raise _cannot_combine_error(where, results)


def _weigh_by_size(results: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
    return [result * (size / sum(sizes)) for result, size in zip(results, sizes, strict=True)]


def _holds_rows(results: Sequence[list[object]], sizes: Sequence[int]) -> bool:
    """Return whether the entries of these lists are tensors with one row per sample."""
    entries = [(entry, size) for result, size in zip(results, sizes, strict=True) for entry in result]
    return all(isinstance(entry, Tensor) and entry.dim() and len(entry) == size for entry, size in entries)


def _by_child(function: Callable[..., Any], first: Any, *others: Any) -> object:
    """Return a structure like `first`, with the result of `function` for each of its children and the others'."""
    if isinstance(first, Mapping):
        return rebuild_mapping(first, {key: function(first[key], *(other[key] for other in others)) for key in first})
    if isinstance(first, list | tuple):
        made = [function(*children) for children in zip(first, *others, strict=True)]
        return type(first)(*made) if hasattr(first, "_fields") else type(first)(made)
    if _is_dataclass(first):
        names = [field.name for field in dataclasses.fields(first) if field.init]
        changes = {name: function(*(getattr(data, name) for data in (first, *others))) for name in names}
        return dataclasses.replace(first, **changes)
    return first


def _is_dataclass(data: object) -> bool:
    return dataclasses.is_dataclass(data) and not isinstance(data, type)


def _cannot_combine_error(where: str, results: Sequence[object]) -> ModuleError:
    kinds = {type(result).__name__ for result in results}
    shown = sorted(kinds) if len(kinds) > 1 else [r if isinstance(r, str) else f"{r!r:.60}" for r in results]
    return ModuleError(
        f"{where} must return values that can be combined over the slices of a batch, got {', '.join(shown)}; return "
        "tensors with a row for each sample, numbers, or mappings of those, with the same keys for every batch."
    )
