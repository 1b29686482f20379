"""Digests of tensors: numbers that stand for all their bits, computed where they are, whole or for a part of one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

_CHUNK: Final = {"cpu": 1 << 17}
"""Numbers in a chunk, which fits into a cache; elsewhere, few chunks matter more."""
_LARGE_CHUNK: Final = 1 << 22
_ODD: Final = (0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64))
"""Multipliers of splitmix64, as signed numbers."""
_TABLE: Final = 1 << 16
"""Words that share a factor of their weights in `part_digest`."""
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_tensor(tensor: Tensor) -> Tensor:
    """Return an int64 scalar on the tensor's device, without waiting for the device.

    Tensors with other values, or with the same ones in another order, have another digest (but for 1 in 2 ** 32, and
    for most changes in 2 ** 64; a change of one value always gives another).
    """
    return _digest_tensors([tensor])[0]


def digest_of_all(tensors: Iterable[Tensor]) -> Tensor:
    """Return an int64 scalar on the CPU that stands for several tensors in this order, after one wait for each device.

    Small ones of a kind are digested together: on a GPU, each digest costs a dozen kernels.
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    total = torch.zeros((), dtype=torch.int64)
    for of_kind in by_kind.values():
        for number in torch.stack(_digest_tensors(_join_small_tensors(of_kind))).cpu():
            total = mix_numbers(total) + number
    return total


@torch.no_grad()
def _digest_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the digests of tensors on the same device."""
    weights = torch.empty(0, dtype=torch.int64)
    totals = []
    for tensor in tensors:
        bits = bits_of(tensor)
        if bits.storage_offset() * bits.element_size() % 8:
            bits = bits.clone()  # where a view as larger numbers can begin
        whole = len(bits) - len(bits) % (8 // bits.element_size())
        words, rest = bits[:whole].view(torch.int64), bits[whole:].to(torch.int64)
        size = _size_of_chunks(bits)
        if len(weights) < min(max(len(words), len(rest)), size):
            # odd, so that no change of a number is multiplied away
            weights = mix_numbers(torch.arange(1, min(max(len(words), 8), size) + 1, device=bits.device)) | 1
        total = torch.zeros((), dtype=torch.int64, device=bits.device)
        for chunk in (*words.split(size), rest):
            if len(chunk):
                # overflow wraps around; without the shift, the highest bits, which are signs, would cancel out in pairs
                total = mix_numbers(total) + (weights[: len(chunk)] * (chunk ^ (chunk >> 32))).sum()
        totals.append(total)
    return totals


def _join_small_tensors(tensors: Iterable[Tensor]) -> Iterable[Tensor]:
    """Yield large tensors as they are, and small ones in concatenations of about the size of a chunk."""
    waiting: list[Tensor] = []
    size = 0
    for tensor in tensors:
        most = _size_of_chunks(tensor)
        if tensor.numel() > most // 2:  # copying it would take longer than a digest of its own
            yield tensor
            continue
        waiting.append(tensor.detach().reshape(-1))
        size += tensor.numel()
        if size > most:
            yield torch.cat(waiting)
            waiting, size = [], 0
    if waiting:
        yield torch.cat(waiting)


def _size_of_chunks(tensor: Tensor) -> int:
    return _CHUNK.get(tensor.device.type, _LARGE_CHUNK)


def bits_of(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as integers in one dimension: two for each complex number."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.detach().contiguous().reshape(-1).view(_BITS[tensor.element_size()])


def mix_numbers(numbers: Tensor) -> Tensor:
    """Return other numbers, which have no simple relation to these ones."""
    numbers = numbers * _ODD[0]
    numbers = (numbers ^ (numbers >> 29)) * _ODD[1]
    return numbers ^ (numbers >> 32)


@torch.no_grad()
def part_digest(part: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return an int64 scalar for a rectangular part of a tensor; those of all parts add up to that of the tensor.

    So it is the same on every layout, modulo 2 ** 64: the sum of its words of 32 bits, each multiplied by a number that
    depends on its place in the whole tensor.

    Args:
        part: The part.
        offsets: Where it begins in the whole tensor.
        shape: The shape of the whole tensor.
    """
    if part.is_complex():
        part, offsets, shape = torch.view_as_real(part.resolve_conj()), (*offsets, 0), (*shape, 2)
    size, bits, table = (
        part.element_size(),
        bits_of(part),
        mix_numbers(torch.arange(1, _TABLE + 1, device=part.device)) | 1,
    )
    is_in_a_row = tuple(part.shape[1:]) == tuple(shape[1:])
    begin = offsets[0] * math.prod(shape[1:]) * size if part.dim() else 0
    if not is_in_a_row or begin % 4:
        return _digest_of_elements(bits, part.shape, offsets, shape, table)
    whole = len(bits) - len(bits) % max(1, 4 // size)
    total, word = torch.zeros((), dtype=torch.int64, device=part.device), begin // 4
    if bits.storage_offset() * size % 4:
        bits = bits.clone()  # where a view as larger numbers can begin
    words = bits[:whole].view(torch.int32)
    step = 2 * _TABLE if part.device.type == "cpu" else 64 * _TABLE
    while len(words):
        rest = (_TABLE - word % _TABLE) % _TABLE or min(step, max(_TABLE, len(words) // _TABLE * _TABLE))
        chunk, words = words[:rest].to(torch.int64) & 0xFFFFFFFF, words[rest:]
        total = total + _sum_weighted_words(chunk, word, table)
        word += len(chunk)
    if whole < len(bits):
        at = torch.arange(begin // size + whole, begin // size + len(bits), device=part.device)
        total = total + _weighed_elements(bits[whole:], at, table)
    return total


def _sum_weighted_words(words: Tensor, first: int, table: Tensor) -> Tensor:
    """Return the sum of words that follow each other, each multiplied by its weight."""
    if first % _TABLE or len(words) % _TABLE:
        cut = min(len(words), _TABLE - first % _TABLE)
        sums = (words[:cut] * table[first % _TABLE :][:cut]).sum() * _make_factor(first // _TABLE, table)
        return sums if cut == len(words) else sums + _sum_weighted_words(words[cut:], first + cut, table)
    rows = (words.view(-1, _TABLE) * table).sum(1)
    factors = mix_numbers(torch.arange(first // _TABLE, first // _TABLE + len(rows), device=words.device) + _TABLE) | 1
    return (rows * factors).sum()


def _make_factor(number: int, table: Tensor) -> Tensor:
    return mix_numbers(torch.tensor(number + _TABLE, device=table.device)) | 1


def _digest_of_elements(
    bits: Tensor, part: Sequence[int], offsets: Sequence[int], shape: Sequence[int], table: Tensor
) -> Tensor:
    """Return the digest of a part whose elements do not follow each other in the whole, or begin inside a word."""
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    step = _size_of_chunks(bits)
    for start in range(0, len(bits), step):
        chunk = bits[start : start + step]
        here = torch.arange(start, start + len(chunk), device=bits.device)
        at, stride = torch.zeros_like(here), 1
        for size, offset, whole in reversed(list(zip(part, offsets, shape, strict=True))):
            at += (here % size + offset) * stride
            here, stride = here // size, stride * whole
        total = total + _weighed_elements(chunk, at, table)
    return total


def _weighed_elements(bits: Tensor, at: Tensor, table: Tensor) -> Tensor:
    """Return the sum of elements, each shifted to its place in its word and multiplied by the word's weight."""
    size, values = bits.element_size(), bits.to(torch.int64)
    if size == 8:
        low, high = values & 0xFFFFFFFF, (values >> 32) & 0xFFFFFFFF
        return _weighed_at(low, 2 * at, table) + _weighed_at(high, 2 * at + 1, table)
    values = (values & ((1 << 8 * size) - 1)) << (at * size % 4 * 8)
    return _weighed_at(values, at * size // 4, table)


def _weighed_at(values: Tensor, words: Tensor, table: Tensor) -> Tensor:
    return (values * table[words % _TABLE] * (mix_numbers(words // _TABLE + _TABLE) | 1)).sum()
