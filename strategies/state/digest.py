"""Digest of a tensor: a number that stands for all its bits, computed where the tensor is."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_CHUNK: Final = {"cpu": 1 << 17}
"""Numbers in a chunk, which fits into a cache; elsewhere, few chunks matter more."""
_LARGE_CHUNK: Final = 1 << 22
_ODD: Final = (0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64))
"""Multipliers of splitmix64, as signed numbers."""
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """Return an int64 scalar on the tensor's device, without waiting for the device.

    Tensors with other values, or with the same ones in another order, have another digest (but for 1 in 2 ** 64).
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    bits = tensor.detach().contiguous().reshape(-1).view(_BITS[tensor.element_size()])
    size = _CHUNK.get(bits.device.type, _LARGE_CHUNK)
    weights = mixed(torch.arange(1, min(len(bits), size) + 1, device=bits.device))
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for chunk in bits.split(size):
        # overflow wraps around
        total = mixed(total) + (weights[: len(chunk)] * chunk).sum()
    return total


def mixed(numbers: Tensor) -> Tensor:
    """Return other numbers, which have no simple relation to these ones."""
    numbers = numbers * _ODD[0]
    numbers = (numbers ^ (numbers >> 29)) * _ODD[1]
    return numbers ^ (numbers >> 32)
