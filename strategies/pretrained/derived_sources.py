"""Sources made of others: joined, stacked, cut or transposed, of which still only the wanted blocks are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..state.sources import TensorSource, copy_whole


class Joined:
    """Sources one after the other along a dimension."""

    def __init__(self, parts: Sequence[TensorSource], dim: int) -> None:
        self._parts, self._dim = parts, dim % len(parts[0].shape)
        shape = list(parts[0].shape)
        shape[self._dim] = sum(part.shape[self._dim] for part in parts)
        self.shape, self.dtype = torch.Size(shape), parts[0].dtype

    def copy_to(self, target: Tensor, offsets: Sequence[int]) -> None:
        """Copy a block, each piece of it from its part."""
        dim, end = self._dim, 0
        first, last = offsets[dim], offsets[dim] + target.shape[dim]
        for part in self._parts:
            begin, end = end, end + part.shape[dim]
            start, stop = max(first, begin), min(last, end)
            if start < stop:
                inner = list(offsets)
                inner[dim] = start - begin
                part.copy_to(target.narrow(dim, start - first, stop - start), inner)


class Row:
    """A source with a new dimension of size 1, to be stacked."""

    def __init__(self, whole: TensorSource, dim: int) -> None:
        self._whole, self._dim = whole, dim % (len(whole.shape) + 1)
        shape = list(whole.shape)
        shape.insert(self._dim, 1)
        self.shape, self.dtype = torch.Size(shape), whole.dtype

    def copy_to(self, target: Tensor, offsets: Sequence[int]) -> None:
        """Copy a block without the new dimension."""
        inner = list(offsets)
        del inner[self._dim]
        self._whole.copy_to(target.squeeze(self._dim), inner)


class Portion:
    """A part of a source along a dimension; with `is_row`, without this dimension."""

    def __init__(self, whole: TensorSource, dim: int, start: int, length: int, *, is_row: bool = False) -> None:
        self._whole, self._dim, self._start, self._is_row = whole, dim % len(whole.shape), start, is_row
        shape = list(whole.shape)
        shape[self._dim : self._dim + 1] = [] if is_row else [length]
        self.shape, self.dtype = torch.Size(shape), whole.dtype

    def copy_to(self, target: Tensor, offsets: Sequence[int]) -> None:
        """Copy a block of the part."""
        inner = list(offsets)
        if self._is_row:
            inner.insert(self._dim, self._start)
            target = target.unsqueeze(self._dim)
        else:
            inner[self._dim] += self._start
        self._whole.copy_to(target, inner)


class Transposed:
    """A source with two dimensions exchanged."""

    def __init__(self, whole: TensorSource, dim0: int, dim1: int) -> None:
        self._whole, self._dims = whole, (dim0, dim1)
        self.shape, self.dtype = torch.Size(self._exchanged(whole.shape)), whole.dtype

    def _exchanged(self, numbers: Sequence[int]) -> list[int]:
        exchanged, (one, other) = list(numbers), self._dims
        exchanged[one], exchanged[other] = exchanged[other], exchanged[one]
        return exchanged

    def copy_to(self, target: Tensor, offsets: Sequence[int]) -> None:
        """Copy a block, transposed."""
        self._whole.copy_to(target.transpose(*self._dims), self._exchanged(offsets))


class Computed:
    """A tensor that is computed from whole ones, each time that a block is wanted."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, compute: Callable[[], Tensor]) -> None:
        self.shape, self.dtype, self._compute = shape, dtype, compute

    def copy_to(self, target: Tensor, offsets: Sequence[int]) -> None:
        """Copy a block of what is computed."""
        parts = [slice(offset, offset + length) for offset, length in zip(offsets, target.shape, strict=True)]
        target.copy_(self._compute()[tuple(parts)])


def read_whole(source: TensorSource) -> Tensor:
    """Return all values of a source."""
    whole = torch.empty(source.shape, dtype=source.dtype)
    copy_whole(source, whole)
    return whole
