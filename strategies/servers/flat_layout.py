"""Layout of tensors in flat ones, one per dtype: few messages and few operations serve many parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class FlatLayout:
    """The places of tensors of these shapes and dtypes in flat tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.shapes = [tensor.shape for tensor in tensors]
        self.dtypes = [tensor.dtype for tensor in tensors]
        self._members = {dtype: [i for i, d in enumerate(self.dtypes) if d is dtype] for dtype in self.dtypes}

    def join(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """Return new flat tensors on the CPU; a None is filled with zeros."""
        flats = []
        for dtype, members in self._members.items():
            parts = [tensors[i] for i in members]
            flats.append(
                torch.cat(
                    [
                        torch.zeros(self.shapes[i].numel(), dtype=dtype) if part is None else _flatten_tensor(part)
                        for i, part in zip(members, parts, strict=True)
                    ]
                )
            )
        return flats

    def views(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors in flat ones, as views."""
        views: dict[int, Tensor] = {}
        for members, flat in zip(self._members.values(), flats, strict=True):
            for i, part in zip(members, flat.split([self.shapes[i].numel() for i in members]), strict=True):
                views[i] = part.view(self.shapes[i])
        return [views[i] for i in range(len(self.shapes))]


def _flatten_tensor(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).cpu()


def deal_names(sizes: Mapping[str, int], number: int) -> list[list[str]]:
    """Distribute names over `number` holders: the largest first, each to the holder with the least so far."""
    dealt: list[list[str]] = [[] for _ in range(number)]
    loads = [0] * number
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        holder = loads.index(min(loads))
        dealt[holder].append(name)
        loads[holder] += size
    return dealt


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the size of tensors in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def have_same_bits(tensor: Tensor, other: Tensor) -> bool:
    """Return whether tensors of one shape and dtype are bitwise equal, so NaN equals NaN, and 0.0 differs from -0.0."""
    if tensor.is_complex():
        tensor, other = torch.view_as_real(tensor), torch.view_as_real(other)
    size = tensor.element_size()
    pair = (tensor, other)
    if all(part.is_contiguous() for part in pair):
        ends = [place for part in pair for place in (part.storage_offset(), part.storage_offset() + part.numel())]
        # words of eight bytes are compared fastest
        size = 8 if all(end * size % 8 == 0 for end in ends) else size
        pair = (tensor.view(-1), other.view(-1))
    return torch.equal(*(part.view(_BITS[size]) for part in pair))
