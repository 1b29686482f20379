"""Blocks of a wrapped tensor: cut and joined bit for bit where no quantization block is cut."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from .wrapped_tensors import TensorParts, copy_wrapped, is_wrapped, put_together, rule_of, take_apart, with_changed

Spans = Sequence[tuple[int, int]]
"""For each dimension, the first index and the last index + 1."""


def can_be_cut(tensor: Tensor, number: int) -> bool:
    """Return whether the rows of a wrapped tensor can be cut into equal parts that cut no quantization block."""
    parts = take_apart(tensor)
    shared = rule_of(parts.kind).shared
    of_blocks = [
        held
        for name, held in parts.tensors.items()
        if name not in shared and held.dim() and tuple(held.shape) != parts.shape
    ]
    return all(held.shape[0] % number == 0 == parts.shape[0] % number for held in of_blocks)


class _Overlap(NamedTuple):
    """A stored block, and what is wanted of it."""

    parts: TensorParts
    begin: tuple[int, ...]
    spans: Spans
    """Counted in the whole tensor."""


def join_wrapped(
    blocks: Sequence[tuple[Tensor, Sequence[int]]],
    offsets: Sequence[int],
    sizes: Sequence[int],
    device: torch.device | str | None = None,
) -> Tensor | None:
    """Return a copy of a part of a tensor that is stored in wrapped blocks, wrapped as they are.

    Args:
        blocks: Tensors with their offsets in the whole one.
        offsets: Where the wanted part begins.
        sizes: Its shape.
        device: Where the copy will be; by default, where they are.

    Returns:
        None if it would cut what is quantized together, or if a block is not wrapped.
    """
    held: list[_Overlap] = []
    for tensor, begin in blocks:
        ends = zip(offsets, sizes, begin, tensor.shape, strict=True)
        spans = [(max(o, b), min(o + n, b + m)) for o, n, b, m in ends]
        if not all(start < stop for start, stop in spans):
            continue
        if not is_wrapped(tensor):
            return None
        if spans == [(o, o + n) for o, n in zip(begin, tensor.shape, strict=True)] and tuple(tensor.shape) == (*sizes,):
            return copy_wrapped(tensor, device)
        held.append(_Overlap(take_apart(tensor), tuple(begin), spans))
    held.sort(key=lambda one: one.begin)
    if not held or len({one.parts.kind for one in held}) > 1 or any(map(_is_odd, held)):
        return None
    first, shape = held[0].parts, tuple(sizes)
    rule = rule_of(first.kind)
    contexts = [with_changed(one.parts.context, rule, one.parts.shape, shape) for one in held]
    if any(context != contexts[0] for context in contexts[1:]):
        return None
    wanted = TensorParts(first.kind, {}, contexts[0], shape, torch.empty(shape, device="meta").stride())
    for name in first.tensors:
        if any(name not in one.parts.tensors for one in held):
            return None
        inner = _join_elementwise(held, name, offsets, shape)
        if inner is None:
            inner = _of_rows(held, name, offsets, shape, is_shared=name in rule.shared)
        if inner is None:
            return None
        wanted.tensors[name] = inner.to(device or inner.device)
    return put_together(wanted)


def _is_odd(one: _Overlap) -> bool:
    """Return whether a block is not in the usual order in memory, or is made of tensors that are wrapped themselves."""
    usual = torch.empty(one.parts.shape, device="meta").stride()
    return one.parts.stride != tuple(usual) or any(map(is_wrapped, one.parts.tensors.values()))


def _join_elementwise(
    held: Sequence[_Overlap], name: str, offsets: Sequence[int], shape: tuple[int, ...]
) -> Tensor | None:
    """Return an inner tensor that has an element for each one of the whole; None if this is no such."""
    if any(tuple(one.parts.tensors[name].shape) != one.parts.shape for one in held):
        return None
    inner = held[0].parts.tensors[name]
    joined = torch.empty(shape, dtype=inner.dtype, device=inner.device)
    for one in held:
        to = tuple(slice(start - o, stop - o) for (start, stop), o in zip(one.spans, offsets, strict=True))
        of = tuple(slice(start - b, stop - b) for (start, stop), b in zip(one.spans, one.begin, strict=True))
        joined[to] = one.parts.tensors[name][of]
    return joined


def _of_rows(
    held: Sequence[_Overlap], name: str, offsets: Sequence[int], shape: tuple[int, ...], *, is_shared: bool
) -> Tensor | None:
    """Return an inner tensor for the wanted rows: cut along its first dimension, or the one of all rows."""
    inner = [one.parts.tensors[name] for one in held]
    if is_shared or inner[0].dim() == 0:
        is_same = all(one.dtype == inner[0].dtype and torch.equal(one, inner[0]) for one in inner[1:])
        return inner[0].clone() if is_same else None
    are_whole_rows = all(one.parts.shape[1:] == shape[1:] and one.begin[1:] == (*offsets[1:],) for one in held)
    ratios = {Fraction(one.parts.tensors[name].shape[0], one.parts.shape[0]) for one in held}
    if not are_whole_rows or len(ratios) > 1 or len({(tensor.dtype, tensor.shape[1:]) for tensor in inner}) > 1:
        return None
    ratio, cut = ratios.pop(), []
    for one, tensor in zip(held, inner, strict=True):
        start, stop = (ratio * (at - one.begin[0]) for at in one.spans[0])
        if start.denominator > 1 or stop.denominator > 1:
            return None
        cut.append(tensor[int(start) : int(stop)])
    return torch.cat(cut)
