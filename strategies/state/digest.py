"""Digest of a tensor: a number that stands for all its bits, computed where the tensor is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

_CHUNK: Final = {"cpu": 1 << 17}
"""Numbers in a chunk, which fits into a cache; elsewhere, few chunks matter more."""
_LARGE_CHUNK: Final = 1 << 22
_ODD: Final = (0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64))
"""Multipliers of splitmix64, as signed numbers."""
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensor: Tensor) -> Tensor:
    """Return an int64 scalar on the tensor's device, without waiting for the device.

    Tensors with other values, or with the same ones in another order, have another digest (but for 1 in 2 ** 32, and
    for most changes in 2 ** 64; a change of one value always gives another).
    """
    return _digests([tensor])[0]


def digest_of_all(tensors: Iterable[Tensor]) -> Tensor:
    """Return an int64 scalar on the CPU that stands for several tensors in this order, after one wait for each device.

    Small ones of a kind are digested together: on a GPU, each digest costs a dozen kernels.
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    total = torch.zeros((), dtype=torch.int64)
    for of_kind in by_kind.values():
        for number in torch.stack(_digests(_joined(of_kind))).cpu():
            total = mixed(total) + number
    return total


@torch.no_grad()
def _digests(tensors: Iterable[Tensor]) -> list[Tensor]:
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
            weights = mixed(torch.arange(1, min(max(len(words), 8), size) + 1, device=bits.device)) | 1
        total = torch.zeros((), dtype=torch.int64, device=bits.device)
        for chunk in (*words.split(size), rest):
            if len(chunk):
                # overflow wraps around; without the shift, the highest bits, which are signs, would cancel out in pairs
                total = mixed(total) + (weights[: len(chunk)] * (chunk ^ (chunk >> 32))).sum()
        totals.append(total)
    return totals


def _joined(tensors: Iterable[Tensor]) -> Iterable[Tensor]:
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


def mixed(numbers: Tensor) -> Tensor:
    """Return other numbers, which have no simple relation to these ones."""
    numbers = numbers * _ODD[0]
    numbers = (numbers ^ (numbers >> 29)) * _ODD[1]
    return numbers ^ (numbers >> 32)
